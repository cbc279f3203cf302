// The dtypes that can be reduced, and how their values are added.

#ifndef HVDTRAIN_DTYPES_H_
#define HVDTRAIN_DTYPES_H_

#include <cstddef>
#include <vector>

#include "tensorflow/core/framework/types.pb.h"

namespace hvdtrain {

// Adds `elements` values of each of `slots`, divides the sums by `divisor`, and writes
// them to `result`. They are added in the order of `slots`: equal on every rank and in
// every run.
using Sum = void (*)(const std::vector<const char*>& slots, size_t elements,
                     double divisor, char* result);

struct Dtype {
  size_t bytes;  // of an element
  Sum sum;
  // Of a partial sum, to which more is added: float32 for 16-bit values.
  size_t partial_bytes;
  Sum to_partial;     // of values
  Sum sum_partials;   // of partial sums
  Sum from_partials;  // of partial sums: a value
};

// nullptr for a dtype that cannot be reduced.
const Dtype* FindDtype(tensorflow::DataType type);

}  // namespace hvdtrain

#endif  // HVDTRAIN_DTYPES_H_
