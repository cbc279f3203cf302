#include "dtypes.h"

#include <algorithm>
#include <cstdint>

#include "tensorflow/core/platform/bfloat16.h"
#include "tensorflow/core/platform/types.h"

namespace hvdtrain {
namespace {

// Elements that are added at a time: the accumulators stay in the first-level cache.
constexpr size_t kBlock = 1024;

// The accumulators of half precision are float32: one rounding for any number of ranks.
template <typename Input, typename Accumulator, typename Result>
void SumOf(const std::vector<const char*>& slots, size_t offset, size_t elements,
           double divisor, char* result) {
  Accumulator total[kBlock];
  Result* const output = reinterpret_cast<Result*>(result) + offset;
  for (size_t start = 0; start < elements; start += kBlock) {
    const size_t count = std::min(kBlock, elements - start);
    const auto input = [&](const char* slot) {
      return reinterpret_cast<const Input*>(slot) + offset + start;
    };
    const Input* const first = input(slots.front());
    for (size_t i = 0; i < count; ++i) total[i] = static_cast<Accumulator>(first[i]);
    for (size_t rank = 1; rank < slots.size(); ++rank) {
      const Input* const other = input(slots[rank]);
      for (size_t i = 0; i < count; ++i) total[i] += static_cast<Accumulator>(other[i]);
    }
    if (divisor != 1) {
      for (size_t i = 0; i < count; ++i) total[i] /= static_cast<Accumulator>(divisor);
    }
    for (size_t i = 0; i < count; ++i) output[start + i] = static_cast<Result>(total[i]);
  }
}

template <typename T, typename Accumulator = T>
const Dtype* Entry() {
  static constexpr Dtype entry{sizeof(T),
                               SumOf<T, Accumulator, T>,
                               sizeof(Accumulator),
                               SumOf<T, Accumulator, Accumulator>,
                               SumOf<Accumulator, Accumulator, Accumulator>,
                               SumOf<Accumulator, Accumulator, T>};
  return &entry;
}

}  // namespace

const Dtype* FindDtype(tensorflow::DataType type) {
  switch (type) {
    case tensorflow::DT_HALF:
      return Entry<Eigen::half, float>();
    case tensorflow::DT_BFLOAT16:
      return Entry<tensorflow::bfloat16, float>();
    case tensorflow::DT_FLOAT:
      return Entry<float>();
    case tensorflow::DT_DOUBLE:
      return Entry<double>();
    case tensorflow::DT_INT32:
      return Entry<int32_t>();
    case tensorflow::DT_INT64:
      return Entry<int64_t>();
    default:
      return nullptr;
  }
}

}  // namespace hvdtrain
