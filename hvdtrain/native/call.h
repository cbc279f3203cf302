// What ranks have called, as hosts exchange it.

#ifndef HVDTRAIN_CALL_H_
#define HVDTRAIN_CALL_H_

#include <cstdint>

namespace hvdtrain {

// What the ranks of one host have called. Sent as it is: hosts have one architecture.
struct HostCall {
  uint64_t signature;
  uint64_t elements;
  uint32_t dtype;
  uint32_t is_mean;
  uint32_t active;    // ranks that have not joined
  uint32_t has_differences;  // between ranks of the host
  uint32_t idle_rounds;      // see Links; 0 unless all have joined
  // The rank of the job that was the last of the host to join, and when.
  int32_t last_joined;
  int64_t joined_at;
};

// What the ranks of all hosts have called.
struct JobCall {
  HostCall first;             // of the first host with a rank that has not joined
  uint32_t active;            // ranks of the job that have not joined
  uint32_t have_differences;  // between those
  int32_t last_joined;        // the last rank to join, once all have
};

}  // namespace hvdtrain

#endif  // HVDTRAIN_CALL_H_
