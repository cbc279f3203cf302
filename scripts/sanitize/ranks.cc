// Runs the native collectives with threads of one process as the ranks of several hosts,
// and compares each result with a sum in one thread. For a sanitizer, which sees the
// memory of one process: sanitize.sh compiles it.
//
//     ranks HOST_SIZE...      for example `ranks 2 2`, or `ranks 1 3`

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gathering.h"
#include "links.h"
#include "reduction.h"
#include "rounds.h"
#include "segment.h"

// The address at which a file is mapped, by its descriptor. A sanitizer knows memory by
// its address: all ranks of a host must have the same.
static std::vector<void*> mapped(1024);

extern "C" {

void* __real_mmap(void* address, size_t bytes, int protection, int flags, int fd,
                  off_t offset);
int __real_munmap(void* address, size_t bytes);

// Called by one thread at a time.
void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int fd,
                  off_t offset) {
  if (fd < 0) return __real_mmap(address, bytes, protection, flags, fd, offset);
  if (mapped[fd] == nullptr) {
    mapped[fd] = __real_mmap(address, bytes, protection, flags, fd, offset);
  }
  return mapped[fd];
}

int __wrap_munmap(void*, size_t) { return 0; }

}  // extern "C"

namespace hvdtrain {
namespace {

constexpr size_t kSlotBytes = 1 << 16;

void Check(bool is_right, const std::string& what) {
  if (is_right) return;
  fprintf(stderr, "ranks: %s\n", what.c_str());
  abort();
}

// A job whose ranks are numbered host after host.
class Job {
 public:
  explicit Job(std::vector<int> sizes) : sizes_(std::move(sizes)) {
    const int hosts = sizes_.size();
    smallest_ = *std::min_element(sizes_.begin(), sizes_.end());
    largest_ = *std::max_element(sizes_.begin(), sizes_.end());
    ranks_.assign(hosts * largest_, -1);
    for (int host = 0; host < hosts; ++host) {
      for (int place = 0; place < sizes_[host]; ++place) {
        ranks_[host * largest_ + place] = total_++;
      }
    }
    for (int host = 0; host < hosts; ++host) {
      const size_t bytes = Segment::Bytes(sizes_[host], kSlotBytes);
      files_.push_back(memfd_create("ranks", 0));
      Check(ftruncate(files_[host], bytes) == 0, "no memory");
    }
    Connect();
  }

  ~Job() {
    segments_.clear();
    for (int file : files_) {
      mapped[file] = nullptr;
      close(file);
    }
  }

  int total() const { return total_; }
  // Ranks of the first host.
  int first_host() const { return sizes_[0]; }
  bool is_uniform() const { return smallest_ == largest_; }
  Segment& segment(int rank) { return *segments_[rank]; }

 private:
  void Connect() {
    const int hosts = sizes_.size();
    // By place, host and other host.
    std::vector<std::vector<std::vector<int>>> sockets(
        smallest_, std::vector<std::vector<int>>(hosts, std::vector<int>(hosts, -1)));
    for (auto& at_place : sockets) {
      for (int host = 0; host < hosts; ++host) {
        for (int other = 0; other < host; ++other) {
          if (!AreConnected(hosts, host, other)) continue;
          int pair[2];
          Check(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "no socket");
          at_place[host][other] = pair[0];
          at_place[other][host] = pair[1];
        }
      }
    }
    const Limits limits{std::chrono::microseconds(20), {}, std::chrono::seconds(60)};
    for (int host = 0; host < hosts; ++host) {
      for (int place = 0; place < sizes_[host]; ++place) {
        const Spread spread{hosts, host, place, smallest_, largest_, ranks_};
        std::unique_ptr<Links> links;
        if (hosts > 1 && place < smallest_) {
          std::vector<int> peers;
          for (int other = 0; other < hosts; ++other) {
            peers.push_back(spread.rank(other, place));
          }
          links = std::make_unique<Links>(host, sockets[place][host], peers);
        }
        segments_.push_back(std::make_unique<Segment>(files_[host], kSlotBytes, limits,
                                                      spread, std::move(links)));
      }
    }
    for (auto& segment : segments_) segment->Start();
  }

  const std::vector<int> sizes_;
  int smallest_, largest_, total_ = 0;
  std::vector<int> ranks_, files_;
  std::vector<std::unique_ptr<Segment>> segments_;
};

// Small integers, whose sums are exact in any order.
float Value(int rank, int round, size_t i) { return (rank * 7 + round + i) % 13; }

// From one number to two windows, the last of which has few elements.
constexpr size_t kSizes[] = {1, 7, 1000, 16000, 60000, 300000, 5000000,
                             2, 20, 3000, 20000, 90000, 700000, 4194305};

constexpr int kRounds = std::size(kSizes);

void Reduce(Job& job, int rank, int round, std::mt19937& random) {
  const size_t elements = kSizes[round] + random() % 5, first = elements / 3;
  const bool is_mean = random() % 2;
  std::vector<float> values(elements), result(elements);
  for (size_t i = 0; i < elements; ++i) values[i] = Value(rank, round, i);
  const auto bytes = [](std::vector<float>& from, size_t start) {
    return reinterpret_cast<char*>(from.data() + start);
  };
  Reduction reduction{"sum", 100u + round, [] { return std::string("sum"); },
                      tensorflow::DT_FLOAT, is_mean, {}};
  if (first > 0) reduction.pieces.push_back({bytes(values, 0), bytes(result, 0), first});
  reduction.pieces.push_back(
      {bytes(values, first), bytes(result, first), elements - first});
  const Report report = Allreduce(job.segment(rank), &reduction);
  Check(report.outcome == Outcome::kReduced, "not reduced: " + report.reason);
  for (size_t i = 0; i < elements; i += 1 + elements / 1000) {
    float sum = 0;
    for (int other = 0; other < job.total(); ++other) sum += Value(other, round, i);
    const float expected = is_mean ? sum / job.total() : sum;
    Check(std::abs(result[i] - expected) < 1e-4f * (1 + sum), "a wrong sum");
  }
}

// Rounded to the nearest, ties to even.
uint16_t Bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// The sum of 256 from each rank of the first host and 1 from all others, in bfloat16. It
// is rounded once between hosts: 256 + 1 would be 256.
void ReduceHalf(Job& job, int rank) {
  const int large = job.first_host(), small = job.total() - large;
  // More bytes than are sent with the call.
  std::vector<uint16_t> values(1 << 18, Bfloat16(rank < large ? 256 : 1));
  Reduction reduction{"half", 5, [] { return std::string("half"); },
                      tensorflow::DT_BFLOAT16, false, {}};
  char* const data = reinterpret_cast<char*>(values.data());
  reduction.pieces = {{data, data, values.size()}};
  const Report report = Allreduce(job.segment(rank), &reduction);
  Check(report.outcome == Outcome::kReduced, "not reduced: " + report.reason);
  const uint16_t sum = Bfloat16(256 * large + small);
  for (const uint16_t value : values) Check(value == sum, "a wrong 16-bit sum");
}

void Gather(Job& job, int rank, int round, std::mt19937& random) {
  const size_t elements = 1 + random() % 40000;
  std::vector<std::vector<float>> values(job.total());
  Gathering gathering{"gather", 100u + round, [] { return std::string("gather"); },
                      sizeof(float), {}};
  for (int other = 0; other < job.total(); ++other) {
    values[other].resize(elements + other);
    char* const output = reinterpret_cast<char*>(values[other].data());
    gathering.pieces.push_back({{nullptr, output, elements + other}});
  }
  std::vector<float> own(elements + rank);
  for (size_t i = 0; i < own.size(); ++i) own[i] = Value(rank, round, i);
  gathering.pieces[rank][0].input = reinterpret_cast<char*>(own.data());
  const Report report = Allgather(job.segment(rank), gathering);
  Check(report.outcome == Outcome::kReduced, "not gathered: " + report.reason);
  for (int other = 0; other < job.total(); ++other) {
    for (size_t i = 0; i < values[other].size(); ++i) {
      Check(values[other][i] == Value(other, round, i), "a wrong part");
    }
  }
}

void Mismatch(Job& job, int rank) {
  const Reduction reduction{"sum", 1u + rank % 2,
                            [rank] { return "of " + std::to_string(rank % 2); },
                            tensorflow::DT_FLOAT, false, {}};
  const Report report = Allreduce(job.segment(rank), &reduction);
  Check(report.outcome == Outcome::kMismatch, "no mismatch");
  const std::string last = "rank " + std::to_string(job.total() - 1) + ": of ";
  Check(report.reason.find("rank 0: of 0; rank 1: of 1") == 0 &&
            report.reason.find(last) != std::string::npos,
        report.reason);
}

// All ranks of the first host have joined, and those of the others differ.
void MismatchOfOthers(Job& job, int rank) {
  const int joined = job.first_host();
  if (job.total() < joined + 2) return;
  const Reduction reduction{"sum", 1u + rank, [rank] { return std::to_string(rank); },
                            tensorflow::DT_FLOAT, false, {}};
  const Report report =
      Allreduce(job.segment(rank), rank < joined ? nullptr : &reduction);
  const std::string number = std::to_string(joined);
  Check(report.outcome == Outcome::kMismatch, "no mismatch of the other hosts");
  Check(report.reason.find("rank " + number + ": " + number) == 0, report.reason);
}

void Join(Job& job, int rank) {
  // The last rank reduces alone, before it joins as well.
  Segment& segment = job.segment(rank);
  if (rank == job.total() - 1) {
    float value = 5, result = 0;
    Reduction reduction{"alone", 3, [] { return std::string("alone"); },
                        tensorflow::DT_FLOAT, true, {}};
    reduction.pieces = {{reinterpret_cast<char*>(&value),
                         reinterpret_cast<char*>(&result), 1}};
    const Report report = Allreduce(segment, &reduction);
    Check(report.outcome == Outcome::kReduced && std::abs(result - 5) < 1e-5,
          "a wrong mean of one");
  }
  segment.NumberJoin();
  Report report;
  do {
    report = Allreduce(segment, nullptr);
    Check(report.outcome != Outcome::kLost, "lost: " + report.reason);
  } while (report.outcome != Outcome::kAllJoined);
  Check(report.last_joined == job.total() - 1, "another rank was the last to join");
  Check(segment.Barrier("join").empty(), "lost in join");
}

// The last rank leaves: the others get an error, none waits.
void Leave(Job& job, int rank) {
  Segment& segment = job.segment(rank);
  if (rank == job.total() - 1) {
    segment.Leave();
    return;
  }
  float value = 1;
  Reduction reduction{"sum", 4, [] { return std::string("sum"); },
                      tensorflow::DT_FLOAT, false, {}};
  char* const data = reinterpret_cast<char*>(&value);
  reduction.pieces = {{data, data, 1}};
  const Report report = Allreduce(segment, &reduction);
  Check(report.outcome == Outcome::kLost, "a rank that has left is not missing");
  segment.Leave();
}

void Run(Job& job, int rank) {
  // The same numbers on all ranks.
  std::mt19937 random(7);
  for (int round = 0; round < kRounds; ++round) {
    Reduce(job, rank, round, random);
    if (round % 5 == 0) Mismatch(job, rank);
    if (round % 5 == 1) MismatchOfOthers(job, rank);
    if (round % 7 == 0) Join(job, rank);
    if (round % 7 == 3) ReduceHalf(job, rank);
    if (round % 3 == 0 && job.is_uniform()) Gather(job, rank, round, random);
  }
  Leave(job, rank);
}

}  // namespace
}  // namespace hvdtrain

int main(int count, char** arguments) {
  std::vector<int> sizes;
  for (int i = 1; i < count; ++i) sizes.push_back(atoi(arguments[i]));
  hvdtrain::Job job(sizes);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < job.total(); ++rank) {
    ranks.emplace_back([&job, rank] { hvdtrain::Run(job, rank); });
  }
  for (std::thread& rank : ranks) rank.join();
  printf("%d ranks: all results are right\n", job.total());
}
