// The memory that the ranks of one host share, and their barrier.
//
// Each rank writes to its own member and its own slot alone; the part of a result that
// a rank computes is its own as well. A barrier separates writes from the reads of
// other ranks, so there are no locks.

#ifndef HVDTRAIN_SEGMENT_H_
#define HVDTRAIN_SEGMENT_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "call.h"

namespace hvdtrain {

class Links;

constexpr int kTextBytes = 512;

// What one rank publishes about itself and the reduction that it takes part in.
// A multiple of two cache lines: a rank that spins on one member must not slow down
// the owner of the next.
struct alignas(128) Member {
  std::atomic<uint32_t> arrivals;  // barriers entered; the futex that others wait on
  std::atomic<uint32_t> sleepers;  // ranks that wait on it in the kernel
  std::atomic<uint32_t> has_left;
  std::atomic<uint32_t> progress;  // changes while bytes move to or from other hosts
  std::atomic<uint32_t> join_number;  // counts the calls of join of all ranks, from 1
  int32_t pid;
  uint64_t pid_namespace;
  int64_t joined_at;  // nanoseconds of this host's clock at the last call of join
  // Written before a barrier and read after it.
  uint64_t signature;  // of the reduction, 0 for a rank that has joined
  uint64_t elements;
  uint32_t dtype;
  uint32_t is_mean;
  char text[kTextBytes];  // the signature in words, written only if ranks differ
};

// How long ranks wait for each other.
struct Limits {
  std::chrono::nanoseconds spin;     // before a rank sleeps in the kernel
  std::chrono::nanoseconds warning;  // before missing ranks are printed; 0: never
  std::chrono::nanoseconds failure;  // before the reduction fails; 0: never
};

// On which hosts the ranks of a job are, and where this one is.
struct Spread {
  int hosts, host, place;
  int smallest, largest;  // ranks of a host
  // By host and place on it, `largest` for each host; -1 where a host has no such rank.
  std::vector<int> ranks;

  int rank(int on_host, int at_place) const { return ranks[on_host * largest + at_place]; }
  // Ranks of this host.
  int size() const;
  int job_size() const;
};

// The reason where ranks have not come before `Limits::failure`.
std::string Late(const std::string& operation, const std::string& missing);

class Segment {
 public:
  // Bytes of a segment for `size` ranks with slots of `slot_bytes`.
  static size_t Bytes(int size, size_t slot_bytes);

  // Maps the file `fd` of that length. `links` are nullptr in a job of one host, and
  // where a smaller host has no rank to connect to. Throws std::system_error.
  Segment(int fd, size_t slot_bytes, Limits limits, Spread spread,
          std::unique_ptr<Links> links);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Of this host; `number` is a rank of the job.
  int rank() const { return rank_; }
  int size() const { return size_; }
  int number(int rank) const { return spread_.rank(spread_.host, rank); }
  const Limits& limits() const { return limits_; }
  const Spread& spread() const { return spread_; }
  // In how many parts the ranks of a host add up tensors: those that each host has.
  int parts() const { return spread_.smallest; }
  Links* links() { return links_.get(); }
  size_t slot_bytes() const { return slot_bytes_; }
  Member& member(int rank) { return members_[rank]; }
  Member& mine() { return members_[rank_]; }
  char* slot(int rank) { return slots_ + rank * slot_bytes_; }
  char* result() { return slot(size_); }

  // Called when all ranks have mapped the segment.
  void Start();

  // Blocks until every rank has entered the same barrier. Returns the reason if a rank
  // has left, failed or not come in time, in which another one that exchanges with other
  // hosts has made no progress. `is_limited`: false where the ranks that are
  // waited for have a limit themselves, and can name what is missing.
  std::string Barrier(const std::string& operation, bool is_limited = true);

  // The two halves of a barrier: a rank enters it, and waits for the others. Between
  // them, a rank must not write to memory that other ranks may still read.
  void Arrive();
  std::string Await(const std::string& operation, bool is_limited = true);

  // Memory in which the first rank of this host publishes what hosts have exchanged.
  JobCall& job_call();

  // The reason of the first barrier that failed, empty before. The segment is of no use
  // afterwards: a rank that is late may still read what this one has written.
  const std::string& lost() const { return lost_; }

  // Numbers this rank's call of join.
  void NumberJoin();

  // The rank of this host that called join last. Equal on all ranks once all have.
  int LastJoined();

  // Ends the barriers of all ranks with a reason.
  void Fail(const std::string& reason);

  // The same, also of this rank's barriers, and closes its links. Returns the first
  // reason that any rank has given.
  std::string Lose(const std::string& reason);

  // The reason why a rank that has not arrived never will, if there is one.
  std::string Failure() const;

  // Prints that `operation` has been waited for, and the reason, with its separator.
  void Warn(const std::string& operation, const std::string& reason) const;
  // The same for ranks that have not called it.
  void WarnOfMissing(const std::string& operation, const std::string& missing) const;

  // Ends the barriers of the other ranks: this one will enter no more. Does nothing in
  // a process that was forked from the rank's.
  void Leave();

 private:
  struct Header;
  bool HasArrived(int rank) const;
  std::string WaitFor(int rank, const std::string& operation, bool is_limited);
  std::string Failure(int rank) const;
  std::string Missing() const;
  void WarnOnce(const std::string& operation) const;

  const Spread spread_;
  const int rank_, size_;
  const size_t slot_bytes_;
  const Limits limits_;
  const std::unique_ptr<Links> links_;
  uint32_t barriers_ = 0;
  std::string lost_;
  bool sees_processes_ = false;
  Header* header_;
  Member* members_;
  char* slots_;
};

}  // namespace hvdtrain

#endif  // HVDTRAIN_SEGMENT_H_
