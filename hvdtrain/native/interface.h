// The connection of this process to the other ranks of its node.

#ifndef HVDTRAIN_INTERFACE_H_
#define HVDTRAIN_INTERFACE_H_

#include <atomic>
#include <cstdint>
#include <mutex>

#include "segment.h"

namespace hvdtrain {

// Held during a reduction. Ranks call them in the same order, which the graph holds.
extern std::mutex reduction_mutex;

// nullptr before a process has connected and after it has left. The segments are never
// deleted: a kernel may still wait in one when Python exits.
extern std::atomic<Segment*> segment;

// Of this process in reductions, with the wait for other ranks.
extern std::atomic<uint64_t> reduction_nanoseconds;

}  // namespace hvdtrain

#endif  // HVDTRAIN_INTERFACE_H_
