#include "recorder.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cstring>

namespace hvdtrain {
namespace {

// Never unmapped: an operation may still write while Python exits. Elastic jobs keep
// their ring.
std::atomic<RingHeader*> ring{nullptr};

Record* Records(RingHeader* header) {
  return reinterpret_cast<Record*>(reinterpret_cast<char*>(header) + kHeaderBytes);
}

int64_t Now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

void Copy(char* to, const char* from, size_t bytes) {
  strncpy(to, from, bytes - 1);
  to[bytes - 1] = 0;
}

// Claims the next record. Its sequence is 0 until `Publish`.
Record& Claim(RingHeader* header, uint64_t* sequence) {
  *sequence = header->records.fetch_add(1, std::memory_order_relaxed) + 1;
  Record& record = Records(header)[(*sequence - 1) % kRecords];
  record.sequence.store(0, std::memory_order_relaxed);
  // Before the fields: a reader never sees new fields with the old sequence.
  std::atomic_thread_fence(std::memory_order_release);
  return record;
}

}  // namespace

uint64_t EnterCollective(const char* name, const char* operation, uint64_t bytes,
                         bool is_of_all_ranks) {
  RingHeader* const header = ring.load(std::memory_order_acquire);
  if (header == nullptr) return 0;
  uint64_t sequence;
  Record& record = Claim(header, &sequence);
  record.entered = Now();
  record.left.store(0, std::memory_order_relaxed);
  record.step = header->step.load(std::memory_order_relaxed);
  record.number = is_of_all_ranks ? header->collectives.fetch_add(1) + 1 : 0;
  record.bytes = bytes;
  record.kind = Kind::kCollective;
  record.phase = header->phase.load(std::memory_order_relaxed);
  Copy(record.name, name, sizeof(record.name));
  Copy(record.operation, operation, sizeof(record.operation));
  record.sequence.store(sequence, std::memory_order_release);
  header->current_entered.store(record.entered, std::memory_order_relaxed);
  header->current.store(sequence, std::memory_order_release);
  return sequence;
}

void LeaveCollective(uint64_t sequence) {
  RingHeader* const header = ring.load(std::memory_order_acquire);
  if (header == nullptr || sequence == 0) return;
  // Ranks call one collective after the other. One that has failed is not left: it is
  // replaced by the next.
  uint64_t expected = sequence;
  header->current.compare_exchange_strong(expected, 0);
  Record& record = Records(header)[(sequence - 1) % kRecords];
  if (record.sequence.load(std::memory_order_acquire) != sequence) return;
  const int64_t now = Now();
  record.left.store(now, std::memory_order_release);
  header->collective_nanoseconds[record.phase].fetch_add(now - record.entered);
}

uint32_t EnterPhase(uint32_t phase, bool begins_step) {
  RingHeader* const header = ring.load(std::memory_order_acquire);
  if (header == nullptr || phase >= kPhases) return 0;
  const int64_t now = Now();
  const uint64_t previous = header->phase.exchange(phase);
  const int64_t entered = header->phase_entered.exchange(now);
  header->phase_nanoseconds[previous].fetch_add(now - entered);
  if (begins_step) {
    header->step.fetch_add(1);
    header->step_entered.store(now);
  }
  uint64_t sequence;
  Record& record = Claim(header, &sequence);
  record.entered = now;
  record.left.store(0, std::memory_order_relaxed);
  record.step = header->step.load(std::memory_order_relaxed);
  record.number = record.bytes = 0;
  record.kind = Kind::kPhase;
  record.phase = phase;
  record.name[0] = record.operation[0] = 0;
  record.sequence.store(sequence, std::memory_order_release);
  return previous;
}

}  // namespace hvdtrain

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT size_t hvdtrain_ring_bytes() {
  return hvdtrain::kHeaderBytes + hvdtrain::kRecords * sizeof(hvdtrain::Record);
}

// Maps a new file of that length. Returns 0, or the error number.
EXPORT int hvdtrain_open_ring(const char* path) {
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return errno;
  void* const memory = mmap(nullptr, hvdtrain_ring_bytes(), PROT_READ | PROT_WRITE,
                            MAP_SHARED, fd, 0);
  const int error = memory == MAP_FAILED ? errno : 0;
  close(fd);
  if (error) return error;
  auto* const header = static_cast<hvdtrain::RingHeader*>(memory);
  header->phase_entered = hvdtrain::Now();
  header->format = hvdtrain::kRingFormat;
  hvdtrain::ring = header;
  return 0;
}

// Numbers the collectives of all ranks from 1 again: ranks have left or joined.
EXPORT void hvdtrain_renumber_collectives() {
  auto* const header = hvdtrain::ring.load();
  if (header != nullptr) header->collectives = header->current = 0;
}

EXPORT uint64_t hvdtrain_enter_collective(const char* name, const char* operation,
                                          uint64_t bytes, int is_of_all_ranks) {
  return hvdtrain::EnterCollective(name, operation, bytes, is_of_all_ranks);
}

EXPORT void hvdtrain_leave_collective(uint64_t sequence) {
  hvdtrain::LeaveCollective(sequence);
}

EXPORT uint32_t hvdtrain_enter_phase(uint32_t phase) {
  return hvdtrain::EnterPhase(phase, false);
}

EXPORT void hvdtrain_set_step(uint64_t step) {
  auto* const header = hvdtrain::ring.load();
  if (header == nullptr) return;
  header->step = step;
  header->step_entered = hvdtrain::Now();
}

}  // extern "C"
