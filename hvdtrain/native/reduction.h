// Sums and means of tensors over all ranks: through a Segment within a host, and through
// its Links between hosts.

#ifndef HVDTRAIN_REDUCTION_H_
#define HVDTRAIN_REDUCTION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cursor.h"
#include "dtypes.h"
#include "segment.h"

namespace hvdtrain {

// The reduction of a list of tensors of one dtype.
struct Reduction {
  std::string name;
  uint64_t signature;  // hash of all that the ranks must agree on
  std::function<std::string()> describe;  // the same as text
  tensorflow::DataType dtype;
  bool is_mean;  // over the ranks that have not joined
  std::vector<Piece> pieces;
};

enum class Outcome {
  kReduced,
  kMismatch,   // the signatures of the ranks differ
  kLost,       // a rank has failed, left, or not come in time
  kAllJoined,  // no rank has anything to reduce
};

struct Report {
  Outcome outcome;
  std::string reason;
  int last_joined = -1;  // where all have joined
  int active = 0;        // ranks that have not joined, where tensors were reduced
};

// Reduces over all ranks; blocks until all of them take part. Without a reduction, as a
// rank that has joined, takes part with zeros in that of the other ranks.
Report Allreduce(Segment& segment, const Reduction* reduction);

}  // namespace hvdtrain

#endif  // HVDTRAIN_REDUCTION_H_
