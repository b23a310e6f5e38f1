// Prints what torch's own C++ samplers yield, for the cases on standard input:
//   kind(random|sequential) size world_size rank allow_duplicates epoch new_size(-1: none)
// one case a line in, one line of indices out.
#include <torch/data/samplers/distributed.h>

#include <iostream>
#include <memory>
#include <optional>
#include <string>

using namespace torch::data::samplers;

template <typename Sampler>
void print(Sampler sampler, size_t epoch, std::optional<size_t> new_size) {
  sampler.set_epoch(epoch);
  sampler.reset(new_size);
  while (auto batch = sampler.next(1000)) {
    for (auto index : *batch) std::cout << index << ' ';
  }
  std::cout << '\n';
}

int main() {
  std::string kind;
  long long size, world_size, rank, duplicates, epoch, new_size;
  while (std::cin >> kind >> size >> world_size >> rank >> duplicates >> epoch >> new_size) {
    std::optional<size_t> reset;
    if (new_size >= 0) reset = new_size;
    if (kind == "random") {
      print(DistributedRandomSampler(size, world_size, rank, duplicates != 0), epoch, reset);
    } else {
      print(DistributedSequentialSampler(size, world_size, rank, duplicates != 0), epoch, reset);
    }
  }
}
