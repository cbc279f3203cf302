// The C functions that Python calls. Those that return text return nullptr, or the
// reason of a failure.

#include "interface.h"

#include <chrono>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "links.h"
#include "records.h"
#include "reduction.h"
#include "rounds.h"
#include "tensorflow/core/lib/monitoring/collection_registry.h"

namespace hvdtrain {

std::mutex reduction_mutex;
std::atomic<uint64_t> caller{0};

namespace {

// Guards caller_text and segment. Never held while waiting for other ranks.
std::mutex mutex;
std::string caller_text;
// Not destroyed when the process exits: kernels may still run.
std::shared_ptr<Segment>& segment = *new std::shared_ptr<Segment>;

std::shared_ptr<Segment> ExchangeSegment(std::shared_ptr<Segment> other) {
  std::lock_guard<std::mutex> lock(mutex);
  segment.swap(other);
  return other;
}

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

std::shared_ptr<Segment> CurrentSegment() {
  std::lock_guard<std::mutex> lock(mutex);
  return segment;
}

std::string CallerText() {
  std::lock_guard<std::mutex> lock(mutex);
  return caller_text.empty() ? "" : "in " + caller_text + ": ";
}

}  // namespace hvdtrain

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// A number that changes with these functions, with the operations, and with what ranks
// send to each other; also in __init__.py.
EXPORT int hvdtrain_interface() { return 17; }

EXPORT size_t hvdtrain_segment_bytes(int size, size_t slot_bytes) {
  return hvdtrain::Segment::Bytes(size, slot_bytes);
}

// Whether the ranks of two of `hosts` hosts are connected.
EXPORT int hvdtrain_are_connected(int hosts, int one, int other) {
  return hvdtrain::AreConnected(hosts, one, other);
}

// Maps the file `fd`, which the ranks of this host share. This rank is at `place` of
// `host`. `ranks` has the ranks of each of `hosts` hosts, by place: `largest` numbers for
// each host, -1 after the last rank of one; each host has at least `smallest`. `sockets`,
// of which the process is not the owner any more, are connected to the ranks at this
// place, by host, -1 for hosts that are not connected: nullptr in a job of one host, and
// where not all have such a rank.
EXPORT const char* hvdtrain_connect(int fd, size_t slot_bytes, double spin_seconds,
                                    double warning_seconds, double failure_seconds,
                                    int hosts, int host, int place, int smallest,
                                    int largest, const int* ranks, const int* sockets) {
  const hvdtrain::Limits limits{hvdtrain::Nanoseconds(spin_seconds),
                                hvdtrain::Nanoseconds(warning_seconds),
                                hvdtrain::Nanoseconds(failure_seconds)};
  hvdtrain::Spread spread{hosts,   host,    place,
                          smallest, largest, {ranks, ranks + hosts * largest}};
  try {
    std::unique_ptr<hvdtrain::Links> links;
    if (sockets != nullptr) {
      std::vector<int> peers;
      for (int other = 0; other < hosts; ++other) {
        peers.push_back(spread.rank(other, place));
      }
      links = std::make_unique<hvdtrain::Links>(
          host, std::vector<int>(sockets, sockets + hosts), std::move(peers));
    }
    hvdtrain::ExchangeSegment(std::make_shared<hvdtrain::Segment>(
        fd, slot_bytes, limits, std::move(spread), std::move(links)));
  } catch (const std::exception& exception) {
    return hvdtrain::Failed(exception.what());
  }
  return nullptr;
}

// After all ranks have connected.
EXPORT void hvdtrain_start() { hvdtrain::CurrentSegment()->Start(); }

EXPORT void hvdtrain_set_caller(uint64_t number, const char* text) {
  std::lock_guard<std::mutex> lock(hvdtrain::mutex);
  hvdtrain::caller = number;
  hvdtrain::caller_text = text;
}

// Writes the rank that was the last to call it.
EXPORT const char* hvdtrain_join(int* last) {
  std::lock_guard<std::mutex> lock(hvdtrain::reduction_mutex);
  const auto shared = hvdtrain::CurrentSegment();
  if (shared == nullptr) return hvdtrain::Failed("Horovod has been shut down");
  shared->NumberJoin();
  hvdtrain::Report report;
  do {
    report = hvdtrain::Allreduce(*shared, nullptr);
    if (report.outcome == hvdtrain::Outcome::kLost) {
      return hvdtrain::Failed(report.reason);
    }
  } while (report.outcome != hvdtrain::Outcome::kAllJoined);
  *last = report.last_joined;
  // No rank may write to its member again before all have read the members.
  const std::string lost = shared->Barrier("join");
  return lost.empty() ? nullptr : hvdtrain::Failed(lost);
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

// Of records of a TFRecord file that is mapped at `base`; see records.h.
EXPORT int64_t hvdtrain_check_records(const uint8_t* base, const int64_t* offsets,
                                      const int64_t* lengths, int64_t count) {
  return hvdtrain::FirstBadRecord(base, offsets, lengths, count);
}

// Ends the reductions of all ranks.
EXPORT void hvdtrain_fail(const char* reason) {
  const auto shared = hvdtrain::CurrentSegment();
  if (shared != nullptr) shared->Fail(reason);
}

// Without the mutex, which a kernel that waits for other ranks holds.
EXPORT void hvdtrain_leave() {
  const auto left = hvdtrain::ExchangeSegment(nullptr);
  if (left != nullptr) left->Leave();
}

}  // extern "C"
