/* Rows of a batch of JPEGs: each decoded, as far as its region needs, resized, normalised and written, in one call.

   Called by ctypes, which lets go of the interpreter's lock once for the call. libjpeg-turbo is the one that Pillow has
   loaded: its functions come as pointers, and it refuses a caller whose structures have another size than its own. What
   follows of these is the beginning of those of its version 6.2 (64 bits); their names are libjpeg's.

   The pixels are those of OpenCV: whole blocks averaged as by INTER_AREA, then INTER_LINEAR, in the same fixed point. A
   row that libjpeg warns of is left to others, which judge broken images. */

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { VERSION = 62, GRAYSCALE = 1, RGB = 2, ONE = 2048, AROUND = 4 };

struct decompress;

struct errors {
    void (*error_exit)(struct decompress *);
    void (*emit_message)(struct decompress *, int);
    void *output_message, *format_message, *reset_error_mgr;
    char rest[128];
    jmp_buf back;
};

struct decompress {
    struct errors *err;
    void *mem, *progress, *client_data;
    int is_decompressor, global_state;
    void *src;
    unsigned image_width, image_height;
    int num_components, jpeg_color_space, out_color_space;
    unsigned scale_num, scale_denom;
    double output_gamma;
    int buffered_image, raw_data_out, dct_method, do_fancy_upsampling, do_block_smoothing;
    int quantize_colors, dither_mode, two_pass_quantize, desired_number_of_colors;
    int enable_1pass_quant, enable_external_quant, enable_2pass_quant;
    unsigned output_width, output_height;
    int out_color_components, output_components, rec_outbuf_height, actual_number_of_colors;
    void *colormap;
    unsigned output_scanline;
    char rest[460];
};
_Static_assert(sizeof(struct decompress) == 632, "not the structure of libjpeg's version 6.2");

struct libjpeg {
    struct errors *(*std_error)(struct errors *);
    void (*CreateDecompress)(struct decompress *, int, size_t);
    void (*mem_src)(struct decompress *, const unsigned char *, unsigned long);
    int (*read_header)(struct decompress *, int);
    int (*start_decompress)(struct decompress *);
    void (*crop_scanline)(struct decompress *, unsigned *, unsigned *);
    unsigned (*skip_scanlines)(struct decompress *, unsigned);
    unsigned (*read_scanlines)(struct decompress *, unsigned char **, unsigned);
    void (*abort_decompress)(struct decompress *);
    void (*destroy_decompress)(struct decompress *);
};

/* A row. The region is of the stored image; `turn`: 1 rows and columns change places, 2 rows, 4 columns reversed. */
struct row {
    int64_t data, nbytes, height, width, top, left, rows, columns, factor, turn, out;
};

/* What all rows share: the output's size, the bytes of an element, the steps, in elements, from one row, pixel and
   channel to the next; for each channel and level the element to write, where that is more than a byte. */
struct target {
    int64_t height, width, channels, itemsize, row_step, pixel_step, channel_step;
    const void *table;
};

/* The pixels of the region, row by row, with blocks averaged. */
struct region {
    const struct libjpeg *jpeg;
    struct decompress *d;
    unsigned char *line, *pixels; /* as decoded; where the region begins in it */
    int *sums;
    unsigned char *mean;
    int64_t channels, down, across, width, next;
};

static void failed(struct decompress *d) { longjmp(d->err->back, 1); }

static void warned(struct decompress *d, int level) {
    if (level < 0) longjmp(d->err->back, 1);
}

static void decode_line(struct region *r) {
    if (r->jpeg->read_scanlines(r->d, &r->line, 1) != 1) failed(r->d);
}

static const unsigned char *next_row(struct region *r) {
    int64_t n = r->channels, count = r->width * n;
    r->next++;
    if (r->down * r->across == 1) {
        decode_line(r);
        return r->pixels;
    }
    memset(r->sums, 0, count * sizeof(int));
    for (int64_t i = 0; i < r->down; i++) {
        decode_line(r);
        const unsigned char *in = r->pixels;
        for (int64_t x = 0; x < count; x += n)
            for (int64_t k = 0; k < r->across; k++)
                for (int64_t c = 0; c < n; c++) r->sums[x + c] += *in++;
    }
    float share = 1.0f / (float)(r->down * r->across);
    if (r->down == 2 && r->across == 2)
        for (int64_t x = 0; x < count; x++) r->mean[x] = (unsigned char)((r->sums[x] + 2) >> 2);
    else
        for (int64_t x = 0; x < count; x++) r->mean[x] = (unsigned char)lrintf(r->sums[x] * share);
    return r->mean;
}

/* From which place, and with which weights of it and of the next, output `at` of `count` is made. */
static int64_t place(int64_t at, int64_t length, int64_t count, short weights[2]) {
    float f = (float)((at + 0.5) * (1.0 / ((double)count / length)) - 0.5);
    int64_t s = (int64_t)floorf(f);
    f -= s;
    weights[0] = (short)lrintf((1.0f - f) * ONE);
    weights[1] = (short)lrintf(f * ONE);
    return s;
}

#define WRITE(type)                                                                                  \
    for (int64_t c = 0; c < t->channels; c++) {                                                      \
        const type *levels = (const type *)t->table + 256 * c;                                       \
        const unsigned char *in = line + c;                                                          \
        type *out = (type *)to + c * t->channel_step;                                                \
        for (int64_t x = 0; x < width; x++, in += t->channels, out += step) *out = levels[*in];      \
    }

static void write_line(const struct target *t, const unsigned char *line, int64_t width, int64_t step, char *to) {
    if (t->itemsize == 4) {
        WRITE(int32_t)
    } else if (t->itemsize == 2) {
        WRITE(int16_t)
    } else if (step == t->channels) {
        memcpy(to, line, width * step);
    } else {
        for (int64_t x = 0; x < width; x++) memcpy(to + x * step, line + x * t->channels, t->channels);
    }
}

static inline void mix(const unsigned char *in, const int32_t *from, const int32_t *onward, const short *alpha,
                       int64_t width, int n, short *out) {
    for (int64_t x = 0; x < width; x++)
        for (int c = 0; c < n; c++)
            out[x * n + c] =
                (short)((in[from[x] + c] * alpha[2 * x] + in[onward[x] + c] * alpha[2 * x + 1]) >> 4);
}

static void resize(struct region *r, int64_t rows, const struct row *row, const struct target *t, void *memory) {
    int64_t n = t->channels, swap = row->turn & 1;
    int64_t height = swap ? t->width : t->height, width = swap ? t->height : t->width;
    /* Of the output as seen: where the first stored pixel goes, and the steps to the next row and pixel. */
    int64_t first = 0, down = t->row_step, across = t->pixel_step;
    if (row->turn & 2) first += (t->height - 1) * down, down = -down;
    if (row->turn & 4) first += (t->width - 1) * across, across = -across;
    int64_t row_step = swap ? across : down, pixel_step = swap ? down : across;

    int32_t *from = memory, *onward = from + width;
    short *alpha = (short *)(onward + width), *held[2] = {alpha + 2 * width, alpha + 2 * width + width * n};
    unsigned char *line = (unsigned char *)(held[1] + width * n);
    int mirrored = pixel_step < 0;
    if (mirrored) first += (width - 1) * pixel_step, pixel_step = -pixel_step;
    for (int64_t i = 0; i < width; i++) {
        int64_t x = mirrored ? width - 1 - i : i, s = place(i, r->width, width, alpha + 2 * x);
        if (s < 0 || s >= r->width - 1) {
            alpha[2 * x] = ONE, alpha[2 * x + 1] = 0;
            s = s < 0 ? 0 : r->width - 1;
        }
        from[x] = (int32_t)(s * n);
        onward[x] = (int32_t)((s < r->width - 1 ? s + 1 : s) * n);
    }
    for (int64_t y = 0; y < height; y++) {
        short beta[2];
        int64_t s = place(y, rows, height, beta);
        short *line_of[2];
        for (int k = 0; k < 2; k++) {
            int64_t at = s + k < 0 ? 0 : s + k >= rows ? rows - 1 : s + k;
            short *scaled = line_of[k] = held[at & 1];
            if (r->next > at) continue; /* it is held */
            const unsigned char *in;
            do in = next_row(r);
            while (r->next <= at);
            if (n == 1) mix(in, from, onward, alpha, width, 1, scaled);
            else mix(in, from, onward, alpha, width, 3, scaled);
        }
        const short *a = line_of[0], *b = line_of[1];
        for (int64_t x = 0; x < width * n; x++) {
            short upper = (short)((a[x] * beta[0]) >> 16), lower = (short)((b[x] * beta[1]) >> 16);
            line[x] = (unsigned char)((upper + lower + 2) >> 2);
        }
        write_line(t, line, width, pixel_step, (char *)row->out + (first + y * row_step) * t->itemsize);
    }
}

static int64_t scaled(int64_t edge, int64_t factor, int64_t most) {
    int64_t at = (int64_t)rint((double)edge / factor);
    return at < most ? at : most;
}

static int decode(const struct libjpeg *jpeg, struct decompress *d, const struct row *row, const struct target *t,
                  void *volatile *memory) {
    if (setjmp(d->err->back)) return 0;
    jpeg->mem_src(d, (const unsigned char *)row->data, row->nbytes);
    jpeg->read_header(d, 1);
    if (d->image_height != row->height || d->image_width != row->width) return 0;
    d->out_color_space = t->channels == 1 ? GRAYSCALE : RGB;
    d->scale_num = 1;
    d->scale_denom = row->factor;
    jpeg->start_decompress(d);
    int64_t high = d->output_height, wide = d->output_width, n = t->channels;
    if (d->output_components != n) return 0;
    int64_t top = scaled(row->top, row->factor, high - 1), bottom = scaled(row->top + row->rows, row->factor, high);
    int64_t left = scaled(row->left, row->factor, wide - 1), right = scaled(row->left + row->columns, row->factor, wide);
    int64_t rows = bottom > top ? bottom - top : 1, columns = right > left ? right - left : 1;

    int64_t out_height = row->turn & 1 ? t->width : t->height, out_width = row->turn & 1 ? t->height : t->width;
    int64_t down = rows / out_height, across = columns / out_width;
    down = down ? down : 1, across = across ? across : 1;
    if (down < 3 && across < 3 && (down < 2 || across < 2)) down = across = 1;
    top += rows % down / 2, left += columns % across / 2, rows /= down, columns /= across;

    /* Pixels at the edge of what is decoded lack neighbours for the chroma. */
    unsigned begin = left > AROUND ? (unsigned)(left - AROUND) : 0;
    int64_t end = left + columns * across + AROUND;
    unsigned width = (unsigned)(end < wide ? end : wide) - begin;
    if (width < wide) jpeg->crop_scanline(d, &begin, &width);
    if (left < begin || left + columns * across > begin + d->output_width) return 0;
    int64_t line = (d->output_width * n + 63) / 64 * 64, means = (columns * n + 15) / 16 * 16;
    char *block = *memory = malloc(line + 5 * means + out_width * (12 + 5 * n) + 64);
    if (!block) return 0;
    struct region region = {
        .jpeg = jpeg, .d = d, .line = (unsigned char *)block, .pixels = (unsigned char *)block + (left - begin) * n,
        .sums = (int *)(block + line), .mean = (unsigned char *)block + line + 4 * means,
        .channels = n, .down = down, .across = across, .width = columns,
    };
    if (top > 0 && jpeg->skip_scanlines(d, (unsigned)top) != top) return 0;
    resize(&region, rows, row, t, block + line + 5 * means);
    return 1;
}

/* Sets `done` for each row that was written. */
void pipegraph_decode_rows(const struct libjpeg *jpeg, int64_t count, const struct row *rows,
                           const struct target *target, unsigned char *done) {
    struct errors errors;
    struct decompress d;
    memset(done, 0, count);
    memset(&d, 0, sizeof d);
    d.err = jpeg->std_error(&errors);
    errors.error_exit = failed;
    errors.emit_message = warned;
    if (setjmp(errors.back)) return;
    jpeg->CreateDecompress(&d, VERSION, sizeof d);
    for (int64_t i = 0; i < count; i++) {
        void *volatile memory = NULL;
        done[i] = (unsigned char)decode(jpeg, &d, &rows[i], target, &memory);
        free(memory);
        jpeg->abort_decompress(&d);
    }
    jpeg->destroy_decompress(&d);
}
