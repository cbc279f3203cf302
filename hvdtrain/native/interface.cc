// The C functions that Python calls. Those that return text return nullptr, or the
// reason of a failure.

#include "interface.h"

#include <chrono>
#include <exception>
#include <string>

#include "reduction.h"
#include "tensorflow/core/lib/monitoring/collection_registry.h"

namespace hvdtrain {

std::mutex reduction_mutex;
std::atomic<Segment*> segment{nullptr};
std::atomic<uint64_t> reduction_nanoseconds{0};

namespace {

// Of the last call that failed.
std::string error;

const char* Failed(const std::string& reason) {
  error = reason;
  return error.c_str();
}

std::chrono::nanoseconds Nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

}  // namespace
}  // namespace hvdtrain

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// A number that changes with these functions and with the operations; also in
// __init__.py.
EXPORT int hvdtrain_interface() { return 7; }

EXPORT size_t hvdtrain_segment_bytes(int size, size_t slot_bytes) {
  return hvdtrain::Segment::Bytes(size, slot_bytes);
}

EXPORT const char* hvdtrain_connect(int fd, int rank, int size, size_t slot_bytes,
                                    double spin_seconds, double warning_seconds,
                                    double failure_seconds) {
  const hvdtrain::Limits limits{hvdtrain::Nanoseconds(spin_seconds),
                                hvdtrain::Nanoseconds(warning_seconds),
                                hvdtrain::Nanoseconds(failure_seconds)};
  try {
    hvdtrain::segment = new hvdtrain::Segment(fd, rank, size, slot_bytes, limits);
  } catch (const std::exception& exception) {
    return hvdtrain::Failed(exception.what());
  }
  return nullptr;
}

// After all ranks have connected.
EXPORT void hvdtrain_start() { hvdtrain::segment.load()->Start(); }

// Writes the rank that was the last to call it.
EXPORT const char* hvdtrain_join(int* last) {
  std::lock_guard<std::mutex> lock(hvdtrain::reduction_mutex);
  hvdtrain::Segment* const shared = hvdtrain::segment;
  if (shared == nullptr) return hvdtrain::Failed("Horovod has been shut down");
  shared->NumberJoin();
  hvdtrain::Report report;
  do {
    report = hvdtrain::Allreduce(*shared, nullptr);
    if (report.outcome == hvdtrain::Outcome::kLost) {
      return hvdtrain::Failed(report.reason);
    }
  } while (report.outcome != hvdtrain::Outcome::kAllJoined);
  *last = shared->LastJoined();
  // No rank may write to its member again before all have read the members.
  const std::string lost = shared->Barrier("join");
  return lost.empty() ? nullptr : hvdtrain::Failed(lost);
}

EXPORT uint64_t hvdtrain_reduction_nanoseconds() {
  return hvdtrain::reduction_nanoseconds;
}

// Of all iterators of this process in GetNext, which tf.data counts; 0 before the
// first. The counter has no function in TensorFlow's Python.
EXPORT int64_t hvdtrain_input_wait_microseconds() {
  using tensorflow::monitoring::CollectionRegistry;
  CollectionRegistry::CollectMetricsOptions options;
  options.collect_metric_descriptors = false;
  const auto metrics = CollectionRegistry::Default()->CollectMetrics(options);
  const auto counter = metrics->point_set_map.find("/tensorflow/data/iterator_busy");
  if (counter == metrics->point_set_map.end()) return 0;
  int64_t total = 0;
  for (const auto& point : counter->second->points) total += point->int64_value;
  return total;
}

// Without the mutex, which a kernel that waits for other ranks holds.
EXPORT void hvdtrain_leave() {
  hvdtrain::Segment* const left = hvdtrain::segment.exchange(nullptr);
  if (left != nullptr) left->Leave();
}

}  // extern "C"
