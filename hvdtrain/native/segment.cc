#include "segment.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <system_error>
#include <utility>

#include "links.h"

namespace hvdtrain {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPageBytes = 4096;
// Interval at which a rank that sleeps checks whether another one has failed.
constexpr std::chrono::milliseconds kCheckInterval(100);

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

size_t RoundUp(size_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// Blocks until `word` is not `value`, it was woken, or the time is over. The futex is
// not private: the waker is another process.
void SleepWhile(const std::atomic<uint32_t>& word, uint32_t value) {
  timespec timeout{0, std::chrono::nanoseconds(kCheckInterval).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void WakeAll(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint64_t PidNamespace() {
  struct stat status{};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

struct alignas(128) Segment::Header {
  // 0: fine; 1: a rank writes the reason; 2: the reason is complete.
  std::atomic<uint32_t> failure;
  std::atomic<uint32_t> joins;  // of all ranks, so far
  char reason[kTextBytes];
  JobCall job_call;
};

size_t Segment::Bytes(int size, size_t slot_bytes) {
  return RoundUp(sizeof(Header) + size * sizeof(Member)) + (size + 1) * slot_bytes;
}

std::string Late(const std::string& operation, const std::string& missing) {
  return "Missing ranks: " + missing + " did not call " + operation +
         " within HOROVOD_STALL_SHUTDOWN_TIME_SECONDS";
}

int Spread::size() const {
  const auto first = ranks.begin() + host * largest;
  return std::count_if(first, first + largest, [](int rank) { return rank >= 0; });
}

int Spread::job_size() const {
  return std::count_if(ranks.begin(), ranks.end(), [](int rank) { return rank >= 0; });
}

Segment::Segment(int fd, size_t slot_bytes, Limits limits, Spread spread,
                 std::unique_ptr<Links> links)
    : spread_(std::move(spread)),
      rank_(spread_.place),
      size_(spread_.size()),
      slot_bytes_(slot_bytes),
      limits_(limits),
      links_(std::move(links)) {
  void* memory = mmap(nullptr, Bytes(size_, slot_bytes), PROT_READ | PROT_WRITE,
                      MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::system_category());
  // A new file holds zeros: the initial state of every field.
  header_ = static_cast<Header*>(memory);
  members_ = reinterpret_cast<Member*>(header_ + 1);
  slots_ = static_cast<char*>(memory) +
           RoundUp(sizeof(Header) + size_ * sizeof(Member));
  mine().pid = getpid();
  mine().pid_namespace = PidNamespace();
}

Segment::~Segment() { munmap(header_, Bytes(size_, slot_bytes_)); }

void Segment::Start() {
  // Containers that share memory may have PID namespaces of their own, in which the
  // numbers of the other ranks mean other processes.
  sees_processes_ = mine().pid_namespace != 0;
  for (int rank = 0; rank < size_; ++rank) {
    sees_processes_ = sees_processes_ &&
                      members_[rank].pid_namespace == mine().pid_namespace &&
                      kill(members_[rank].pid, 0) == 0;
  }
}

bool Segment::HasArrived(int rank) const {
  // The difference, since the counter wraps around.
  const uint32_t arrivals = members_[rank].arrivals.load(std::memory_order_acquire);
  return static_cast<int32_t>(arrivals - barriers_) >= 0;
}

JobCall& Segment::job_call() { return header_->job_call; }

std::string Segment::Barrier(const std::string& operation, bool is_limited) {
  Arrive();
  return Await(operation, is_limited);
}

void Segment::Arrive() {
  Member& own = mine();
  own.arrivals.store(++barriers_);
  // A rank counts itself as a sleeper before it reads `arrivals` for the last time:
  // with both in sequential order, either it sees this arrival or it is woken.
  if (own.sleepers.load() > 0) WakeAll(own.arrivals);
}

std::string Segment::Await(const std::string& operation, bool is_limited) {
  for (int rank = 0; rank < size_ && lost_.empty(); ++rank) {
    if (!HasArrived(rank)) lost_ = WaitFor(rank, operation, is_limited);
  }
  // For the ranks of other hosts, which wait for this one.
  if (!lost_.empty() && links_) links_->Close();
  return lost_;
}

std::string Segment::WaitFor(int rank, const std::string& operation,
                             bool is_limited) {
  auto start = Clock::now();
  while (Clock::now() - start < limits_.spin) {
    for (int i = 0; i < 64; ++i) {
      if (HasArrived(rank)) return "";
      Pause();
    }
  }
  Member& member = members_[rank];
  bool has_warned = limits_.warning.count() == 0;
  member.sleepers.fetch_add(1);
  uint32_t progress = member.progress.load();
  std::string reason;
  while (true) {
    const uint32_t seen = member.arrivals.load();
    if (HasArrived(rank)) break;
    SleepWhile(member.arrivals, seen);
    if (HasArrived(rank)) break;
    // Of any rank: this one may compute for long while another has ended.
    reason = Failure();
    if (HasArrived(rank)) {
      reason.clear();
      break;
    }
    if (!reason.empty()) break;
    if (!is_limited) continue;
    if (const uint32_t now = member.progress.load(); now != progress) {
      progress = now;
      start = Clock::now();
    }
    const auto waited = Clock::now() - start;
    if (!has_warned && waited > limits_.warning) {
      has_warned = true;
      WarnOnce(operation);
    }
    if (limits_.failure.count() && waited > limits_.failure) {
      Fail(Late(operation, Missing()));
    }
  }
  member.sleepers.fetch_sub(1);
  return reason;
}

std::string Segment::Failure() const {
  if (header_->failure.load() == 2) return header_->reason;
  for (int rank = 0; rank < size_; ++rank) {
    if (HasArrived(rank)) continue;
    const std::string reason = Failure(rank);
    // It may have arrived and then left: it is not missing from this barrier.
    if (!reason.empty() && !HasArrived(rank)) return reason;
  }
  return "";
}

std::string Segment::Failure(int rank) const {
  const Member& member = members_[rank];
  if (member.has_left.load()) {
    return "rank " + std::to_string(number(rank)) + " has left the job";
  }
  // A process that was killed could not set `has_left`.
  if (sees_processes_ && kill(member.pid, 0) != 0 && errno == ESRCH) {
    return "rank " + std::to_string(number(rank)) + " has ended";
  }
  return "";
}

std::string Segment::Missing() const {
  std::string ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (HasArrived(rank)) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(number(rank));
  }
  return ranks;
}

void Segment::WarnOnce(const std::string& operation) const {
  // One rank prints: the first of those that wait.
  for (int rank = 0; rank < rank_; ++rank) {
    if (HasArrived(rank)) return;
  }
  WarnOfMissing(operation, Missing());
}

void Segment::Warn(const std::string& operation, const std::string& reason) const {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limits_.warning);
  fprintf(stderr, "%s has been waited for %lld s%s\n", operation.c_str(),
          static_cast<long long>(seconds.count()), reason.c_str());
}

void Segment::WarnOfMissing(const std::string& operation,
                            const std::string& missing) const {
  Warn(operation, ". Missing ranks: " + missing +
                      ". Ranks that call different collectives, or not equally many, "
                      "wait for each other.");
}

void Segment::Fail(const std::string& reason) {
  uint32_t fine = 0;
  if (header_->failure.compare_exchange_strong(fine, 1)) {
    snprintf(header_->reason, kTextBytes, "%s", reason.c_str());
    header_->failure.store(2);
  }
  // Ranks that sleep read it after kCheckInterval at the latest.
}

std::string Segment::Lose(const std::string& reason) {
  Fail(reason);
  links_->Close();
  return lost_ = header_->failure.load() == 2 ? header_->reason : reason;
}

void Segment::NumberJoin() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  mine().joined_at = std::chrono::nanoseconds(now).count();
  mine().join_number.store(header_->joins.fetch_add(1) + 1);
}

int Segment::LastJoined() {
  int last = 0;
  for (int rank = 1; rank < size_; ++rank) {
    if (members_[rank].join_number.load() > members_[last].join_number.load()) {
      last = rank;
    }
  }
  return last;
}

void Segment::Leave() {
  if (mine().pid != getpid()) return;
  mine().has_left.store(1);
  if (links_) links_->Close();
}

}  // namespace hvdtrain
