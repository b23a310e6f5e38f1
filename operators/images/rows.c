/* Rows of a batch of JPEGs: each read, cut at random, decoded as far as the cut needs, resized, normalised and written,
   all in one call.

   Called by ctypes, which lets go of the interpreter's lock once for the call. libjpeg-turbo is the one that Pillow has
   loaded: its functions come as pointers, and it refuses a caller whose structures have another size than its own. What
   follows of these is the beginning of those of its version 6.2 (64 bits); their names are libjpeg's.

   The pixels are those of OpenCV: whole blocks averaged as by INTER_AREA, then INTER_LINEAR, in the same fixed point. A
   row that libjpeg warns of, a file that cannot be read and an unusual header are left to others, which judge them. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { VERSION = 62, GRAYSCALE = 1, RGB = 2, ONE = 2048, AROUND = 4, TRIES = 10, DRAWS = 3 + 2 * TRIES };
enum { WHOLE, RANDOM, CENTRE, MAX_PIXELS = 89478485 };

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

/* A row. `turn`: 1 rows and columns change places, 2 rows, 4 columns reversed. */
struct row {
    const unsigned char *data;
    int64_t nbytes, height, width; /* as stored, as is the region */
    int64_t top, left, rows, columns, factor, turn;
    char *out;
};

/* What all rows share: the output's size, the bytes of an element, the steps, in elements, from one row, pixel and
   channel to the next; for each channel and level the element to write, where that is more than a byte. Then the crop,
   as in crop.py, and the probability of a flip. */
struct target {
    int64_t height, width, channels, itemsize, row_step, pixel_step, channel_step;
    const void *table;
    int64_t crop, resize;
    double scale[2], ratio[2], log_ratio[2], flip;
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
        write_line(t, line, width, pixel_step, row->out + (first + y * row_step) * t->itemsize);
    }
}

static int64_t scaled(int64_t edge, int64_t factor, int64_t most) {
    int64_t at = (int64_t)rint((double)edge / factor);
    return at < most ? at : most;
}

static int decode(const struct libjpeg *jpeg, struct decompress *d, const struct row *row, const struct target *t,
                  void *volatile *memory) {
    if (setjmp(d->err->back)) return 0;
    jpeg->mem_src(d, row->data, row->nbytes);
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

static unsigned sixteen(const unsigned char *at, int little) {
    return little ? at[1] << 8 | at[0] : at[0] << 8 | at[1];
}

static int64_t thirty_two(const unsigned char *at, int little) {
    int64_t first = sixteen(at, little), second = sixteen(at + 2, little);
    return little ? second << 16 | first : first << 16 | second;
}

/* The orientation in a block of EXIF; 0 where it has none, or Pillow must judge it. */
static int64_t orientation_in(const unsigned char *exif, int64_t nbytes) {
    static const int sizes[] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8};
    if (nbytes < 8 || (memcmp(exif, "II*\0", 4) && memcmp(exif, "MM\0*", 4))) return 0;
    int little = exif[0] == 'I';
    int64_t at = thirty_two(exif + 4, little);
    if (at + 2 > nbytes) return 0;
    int64_t count = sixteen(exif + at, little);
    for (at += 2; count > 0 && at + 12 <= nbytes; count--, at += 12) {
        unsigned type = sixteen(exif + at + 2, little);
        int64_t length = thirty_two(exif + at + 4, little);
        if (type < 1 || type > 12) return 0;
        if (sixteen(exif + at, little) == 0x0112) {
            if (type != 3 || length != 1) return 0;
            int64_t value = sixteen(exif + at + 8, little);
            return value >= 1 && value <= 8 ? value : 1;
        }
        if (length * sizes[type] > 4 && thirty_two(exif + at + 8, little) + length * sizes[type] > nbytes) return 0;
    }
    return 0;
}

/* Of an ordinary JPEG, as header.py knows it, height, width and orientation; 0 for all others. */
static int64_t read_header(struct row *row) {
    const unsigned char *data = row->data, *exif = NULL;
    int64_t place = 2, exif_nbytes = 0, channels = 0;
    int turned = 0;
    if (row->nbytes < 4 || data[0] != 0xFF || data[1] != 0xD8) return 0;
    for (;;) {
        if (place + 4 > row->nbytes) return 0;
        const unsigned char *body = data + place + 4;
        int marker = data[place + 1], length = (int)sixteen(data + place + 2, 0) - 2;
        if (data[place] != 0xFF || marker == 0xFF || length < 1 || place + 4 + length > row->nbytes) return 0;
        place += 4 + length;
        if (marker == 0xDA) break;
        if (marker == 0xE1) {
            turned |= memmem(body, length, "Orientation", 11) != NULL;
            if (length >= 6 && !memcmp(body, "Exif\0", 6)) {
                if (exif) return 0; /* several segments are one block */
                exif = body + 6, exif_nbytes = length - 6;
                turned |= memmem(exif, exif_nbytes, "\1\x12", 2) || memmem(exif, exif_nbytes, "\x12\1", 2);
            }
        } else if (marker >= 0xC0 && marker <= 0xC2) {
            if (length < 6 || body[0] != 8) return 0;
            row->height = sixteen(body + 1, 0), row->width = sixteen(body + 3, 0), channels = body[5];
        } else if (marker >= 0xC3 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC) {
            return 0;
        }
    }
    int64_t pixels = row->height * row->width;
    if ((channels != 1 && channels != 3) || pixels < 1 || pixels > MAX_PIXELS) return 0;
    int64_t end = row->nbytes - 2; /* no other marker of pixels looks like that of the end */
    while (end >= place && (data[end] != 0xFF || data[end + 1] != 0xD9)) end--;
    if (end < place) return 0;
    return !turned ? 1 : exif ? orientation_in(exif, exif_nbytes) : 0;
}

/* The first numbers in [0, 1) of NumPy's Generator(Philox(key)). */
static void draw(const uint64_t key[2], double numbers[DRAWS]) {
    for (uint64_t i = 0; i < DRAWS; i += 4) {
        uint64_t c[4] = {i / 4 + 1, 0, 0, 0}, k[2] = {key[0], key[1]};
        for (int round = 0; round < 10; round++) {
            unsigned __int128 a = (unsigned __int128)0xD2E7470EE14C6C93 * c[0];
            unsigned __int128 b = (unsigned __int128)0xCA5A826395121157 * c[2];
            c[0] = (uint64_t)(b >> 64) ^ c[1] ^ k[0], c[1] = (uint64_t)b;
            c[2] = (uint64_t)(a >> 64) ^ c[3] ^ k[1], c[3] = (uint64_t)a;
            k[0] += 0x9E3779B97F4A7C15, k[1] += 0xBB67AE8584CAA73B;
        }
        for (uint64_t n = i; n < i + 4 && n < DRAWS; n++) numbers[n] = (double)(c[n - i] >> 11) / 9007199254740992.0;
    }
}

static double within(double value, double most) { return value < 1 ? 1 : value > most ? most : value; }

/* Where an output of the target's size is cut out of an image of height x width, as crop.py does it. */
static void cut(struct row *row, const struct target *t, double height, double width, const double *numbers) {
    double h = height, w = width, low = t->scale[0], high = t->scale[1];
    if (t->crop == CENTRE) {
        double scale = (height < width ? height : width) / (double)t->resize;
        h = within(rint(t->height * scale), height), w = within(rint(t->width * scale), width);
    } else if (t->crop == RANDOM) {
        for (int i = 3; i < DRAWS; i += 2) {
            double area = height * width * (low + (high - low) * numbers[i]);
            double ratio = exp(t->log_ratio[0] + (t->log_ratio[1] - t->log_ratio[0]) * numbers[i + 1]);
            w = rint(sqrt(area * ratio)), h = rint(sqrt(area / ratio));
            if (w < 1 || w > width || h < 1 || h > height) continue;
            row->top = (int64_t)(numbers[1] * (height - h + 1)), row->left = (int64_t)(numbers[2] * (width - w + 1));
            row->rows = (int64_t)h, row->columns = (int64_t)w;
            return;
        }
        h = height, w = width;
        if (width < height * t->ratio[0]) h = within(rint(width / t->ratio[0]), height);
        else if (width > height * t->ratio[1]) w = within(rint(height * t->ratio[1]), width);
    }
    row->rows = (int64_t)h, row->columns = (int64_t)w;
    row->top = (int64_t)(height - h) / 2, row->left = (int64_t)(width - w) / 2;
}

/* The region to decode and by which factor; 0 where the header is unusual. */
static int prepare(struct row *row, const struct target *t, const uint64_t key[2]) {
    static const int turns[] = {0, 0, 4, 6, 2, 1, 5, 7, 3}; /* by EXIF's orientations */
    int64_t orientation = read_header(row);
    if (!orientation) return 0;
    int64_t turn = turns[orientation], swap = turn & 1;
    int64_t height = swap ? row->width : row->height, width = swap ? row->height : row->width;
    double numbers[DRAWS] = {1};
    if (t->crop == RANDOM || t->flip > 0) draw(key, numbers);
    cut(row, t, (double)height, (double)width, numbers);
    if (turn & 2) row->top = height - row->top - row->rows;
    if (turn & 4) row->left = width - row->left - row->columns;
    int64_t top = row->top, rows = row->rows, out_height = t->height, out_width = t->width;
    if (swap) {
        row->top = row->left, row->left = top, row->rows = row->columns, row->columns = rows;
        out_height = t->width, out_width = t->height;
    }
    row->turn = numbers[0] < t->flip ? turn ^ 4 : turn;
    row->factor = 8;
    while (row->factor > 1 && (row->rows < row->factor * out_height || row->columns < row->factor * out_width))
        row->factor /= 2;
    return 1;
}

/* All of a regular file, and its length in `nbytes`; NULL for all others. */
static unsigned char *read_file(const char *path, int64_t *nbytes) {
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) return NULL;
    struct stat status;
    unsigned char *data = NULL;
    if (!fstat(file, &status) && S_ISREG(status.st_mode) && (data = malloc(status.st_size + 1))) {
        *nbytes = read(file, data, status.st_size + 1);
        if (*nbytes != status.st_size) free(data), data = NULL; /* it grows, or the system reads it in parts */
    }
    close(file);
    return data;
}

/* Encoded bytes, or where there are fewer than none a path. */
struct place {
    const unsigned char *data;
    int64_t nbytes;
};

/* Sets `done` for each row that was written, one after the other of `step` bytes from `out` on. */
void pipegraph_read_rows(const struct libjpeg *jpeg, const struct target *target, int64_t count,
                           const struct place *places, const uint64_t *keys, char *out, int64_t step,
                           unsigned char *done) {
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
        struct row row = {.data = places[i].data, .nbytes = places[i].nbytes, .out = out + i * step};
        unsigned char *file = row.nbytes < 0 ? read_file((const char *)row.data, &row.nbytes) : NULL;
        void *volatile memory = NULL;
        if (file) row.data = file;
        if (row.nbytes > 0 && prepare(&row, target, keys + 2 * i))
            done[i] = (unsigned char)decode(jpeg, &d, &row, target, &memory);
        free(memory);
        free(file);
        jpeg->abort_decompress(&d);
    }
    jpeg->destroy_decompress(&d);
}
