// The last collectives and phases of this process, in a file that is mapped into memory.
//
// Other processes read the file while this one is blocked, and after it was killed: the
// kernel keeps the pages of a shared mapping. hvdtrain/flight/ring.py has the same
// layout.

#ifndef HVDTRAIN_RECORDER_H_
#define HVDTRAIN_RECORDER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hvdtrain {

constexpr uint64_t kRingFormat = 0x6876647400000001;
constexpr size_t kRecords = 1024, kHeaderBytes = 4096;
constexpr int kPhases = 8;

enum class Kind : uint32_t { kPhase = 1, kCollective = 2 };

// Times are nanoseconds of CLOCK_MONOTONIC, which processes of one host share.
struct Record {
  std::atomic<uint64_t> sequence;  // from 1; 0 while the record is written
  int64_t entered;
  std::atomic<int64_t> left;  // 0 before
  uint64_t step;
  uint64_t number;  // of a collective of all ranks, from 1; 0 for other records
  uint64_t bytes;   // 0 if not known when the graph was traced
  Kind kind;
  uint32_t phase;
  char name[48], operation[24];
};
static_assert(sizeof(Record) == 128);

struct RingHeader {
  uint64_t format;
  std::atomic<uint64_t> records;      // written so far
  std::atomic<uint64_t> collectives;  // of all ranks, entered so far
  std::atomic<uint64_t> current;      // record of the collective in flight, or 0
  std::atomic<int64_t> current_entered;
  std::atomic<uint64_t> step;
  std::atomic<int64_t> step_entered;
  std::atomic<uint64_t> phase;
  std::atomic<int64_t> phase_entered;
  std::atomic<uint64_t> phase_nanoseconds[kPhases];
  std::atomic<uint64_t> collective_nanoseconds[kPhases];  // by phase
  uint64_t fits;  // trainings that have ended; recorder.py counts them
};
static_assert(sizeof(RingHeader) <= kHeaderBytes);

// Records that a collective begins; returns the number of the record, 0 without a ring.
uint64_t EnterCollective(const char* name, const char* operation, uint64_t bytes,
                         bool is_of_all_ranks);
void LeaveCollective(uint64_t sequence);

// Records that a phase begins, which ends the previous one; returns the previous one.
// `begins_step`: it is the first phase of the next step.
uint32_t EnterPhase(uint32_t phase, bool begins_step);

}  // namespace hvdtrain

#endif  // HVDTRAIN_RECORDER_H_
