#include "ring.h"

#include <algorithm>

namespace hvdtrain {
namespace {

constexpr size_t kLineBytes = 128;

size_t Start(Range range, int number, int parts, size_t element_bytes) {
  if (number == parts) return range.second;
  const size_t line = kLineBytes / element_bytes;
  return range.first + (range.second - range.first) * number / parts / line * line;
}

}  // namespace

Range Part(Range range, int number, int parts, size_t element_bytes) {
  return {Start(range, number, parts, element_bytes),
          Start(range, number + 1, parts, element_bytes)};
}

Ring::Ring(int host, int hosts, const Dtype& dtype, char* data, size_t elements,
           double divisor, Block fragment)
    : host_(host),
      hosts_(hosts),
      dtype_(dtype),
      data_(data),
      elements_(elements),
      divisor_(divisor),
      fragment_(fragment) {
  const Range own = Sent(0);
  ready_ = (own.second - own.first) * dtype_.bytes;
  const size_t first = Sent(1).first;
  received_ = {first, first};
}

std::vector<Transfer> Ring::Transfers() {
  std::vector<Transfer> transfers(hosts_);
  Transfer& next = transfers[(host_ + 1) % hosts_];
  for (int step = 0; step < 2 * (hosts_ - 1); ++step) {
    const Range sent = Sent(step);
    next.out.push_back(
        {data_ + sent.first * dtype_.bytes, (sent.second - sent.first) * dtype_.bytes});
  }
  next.ready = &ready_;
  // With two hosts, the one before this one is the next as well.
  transfers[(host_ + hosts_ - 1) % hosts_].then_receive = [this] { return Receive(); };
  return transfers;
}

Range Ring::Sent(int step) const {
  const int number = ((host_ - step) % hosts_ + hosts_) % hosts_;
  return Part({0, elements_}, number, hosts_, dtype_.bytes);
}

std::vector<Block> Ring::Receive() {
  Add();
  size_t first = received_.second;
  Range block = Sent(step_ + 1);
  while (first == block.second) {
    if (++step_ == 2 * (hosts_ - 1)) return {};
    block = Sent(step_ + 1);
    first = block.first;
  }
  const size_t count = std::min(fragment_.bytes / dtype_.bytes, block.second - first);
  received_ = {first, first + count};
  const size_t bytes = count * dtype_.bytes;
  return {{has_sums(step_) ? data_ + first * dtype_.bytes : fragment_.data, bytes}};
}

void Ring::Add() {
  const size_t count = received_.second - received_.first;
  if (!has_sums(step_) && count > 0) {
    // The last of the hosts to add its values divides the sum.
    const double divisor = has_sums(step_ + 1) ? divisor_ : 1;
    char* const own = data_ + received_.first * dtype_.bytes;
    dtype_.sum({fragment_.data, own}, count, divisor, own);
  }
  ready_ += count * dtype_.bytes;
}

}  // namespace hvdtrain
