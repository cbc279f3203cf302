// The connection of this process to the other ranks of its host.

#ifndef HVDTRAIN_INTERFACE_H_
#define HVDTRAIN_INTERFACE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "segment.h"

namespace hvdtrain {

// Held during a reduction. Ranks call them in the same order, which the graph holds.
extern std::mutex reduction_mutex;

// nullptr before a process has connected and after it has left. A kernel that waits in
// a segment keeps it, also when Python exits.
std::shared_ptr<Segment> CurrentSegment();

// The Python thread whose call runs, which ranks compare: 0 for the main thread.
extern std::atomic<uint64_t> caller;

// The same as the beginning of a text.
std::string CallerText();

}  // namespace hvdtrain

#endif  // HVDTRAIN_INTERFACE_H_
