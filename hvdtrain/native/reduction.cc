#include "reduction.h"

#include <algorithm>
#include <cstring>

#include "hosts.h"
#include "mismatch.h"

namespace hvdtrain {
namespace {

// Copies the consecutive elements of a list of tensors, chunk by chunk.
class Cursor {
 public:
  Cursor(const std::vector<Piece>& pieces, size_t element_bytes)
      : pieces_(pieces), element_bytes_(element_bytes) {}

  void CopyTo(char* slot, size_t elements) {
    Advance(elements, [&](const Piece& piece, size_t start, size_t bytes) {
      memcpy(slot, piece.input + start, bytes);
      slot += bytes;
    });
  }

  void CopyFrom(const char* result, size_t elements) {
    Advance(elements, [&](const Piece& piece, size_t start, size_t bytes) {
      if (piece.output != nullptr) memcpy(piece.output + start, result, bytes);
      result += bytes;
    });
  }

 private:
  template <typename Copy>
  void Advance(size_t elements, Copy copy) {
    while (elements > 0) {
      const Piece& piece = pieces_[place_];
      const size_t count = std::min(elements, piece.elements - position_);
      copy(piece, position_ * element_bytes_, count * element_bytes_);
      elements -= count;
      position_ += count;
      if (position_ == piece.elements) {
        ++place_;
        position_ = 0;
      }
    }
  }

  const std::vector<Piece>& pieces_;
  const size_t element_bytes_;
  size_t place_ = 0;
  size_t position_ = 0;
};

void Publish(Member& mine, const Reduction* reduction, size_t elements) {
  mine.signature = reduction ? reduction->signature : 0;
  if (!reduction) return;
  mine.elements = elements;
  mine.dtype = reduction->dtype;
  mine.is_mean = reduction->is_mean;
}

std::vector<int> ActiveRanks(Segment& segment) {
  std::vector<int> active;
  for (int rank = 0; rank < segment.size(); ++rank) {
    if (segment.member(rank).signature != 0) active.push_back(rank);
  }
  return active;
}

bool Agree(Segment& segment, const std::vector<int>& active) {
  return std::all_of(active.begin(), active.end(), [&](int rank) {
    return segment.member(rank).signature == segment.member(active[0]).signature;
  });
}

// What the ranks of this node have called.
Call Summarize(Segment& segment, const std::vector<int>& active) {
  Call call{};
  call.active = active.size();
  if (active.empty()) {
    const int last = segment.LastJoined();
    call.last_joined = segment.number(last);
    call.joined_at = segment.member(last).joined_at;
    return call;
  }
  const Member& any = segment.member(active[0]);
  call.signature = any.signature;
  call.elements = any.elements;
  call.dtype = any.dtype;
  call.is_mean = any.is_mean;
  call.has_differences = !Agree(segment, active);
  return call;
}

// Adds this rank's part of what the active ranks of its node have in their slots.
void SumPart(Segment& segment, const std::vector<int>& active, const Dtype& dtype,
             size_t elements, double divisor) {
  if (active.empty()) return;
  const Range part = Part({0, elements}, segment.rank(), segment.size(), dtype.bytes);
  std::vector<const char*> slots;
  for (int other : active) slots.push_back(segment.slot(other));
  dtype.sum(slots, part.first, part.second - part.first, divisor, segment.result());
}

// Elements that each rank sends.
std::vector<size_t> Totals(const std::vector<std::vector<Piece>>& pieces) {
  std::vector<size_t> totals;
  for (const std::vector<Piece>& each : pieces) {
    totals.push_back(0);
    for (const Piece& piece : each) totals.back() += piece.elements;
  }
  return totals;
}

void CopyOwn(const std::vector<Piece>& pieces, size_t element_bytes) {
  for (const Piece& piece : pieces) {
    if (piece.output == nullptr) continue;
    memcpy(piece.output, piece.input, piece.elements * element_bytes);
  }
}

}  // namespace

Report Allreduce(Segment& segment, const Reduction* reduction) {
  if (!segment.lost().empty()) return {Outcome::kLost, segment.lost()};
  const std::string name = reduction ? reduction->name : "join";
  static const std::vector<Piece> kNone;
  const std::vector<Piece>& pieces = reduction ? reduction->pieces : kNone;
  size_t total = 0;
  for (const Piece& piece : pieces) total += piece.elements;
  Publish(segment.mine(), reduction, total);
  // A rank that has joined has no elements of any dtype.
  const Dtype* dtype = FindDtype(reduction ? reduction->dtype : tensorflow::DT_FLOAT);
  Cursor in(pieces, dtype->bytes), out(pieces, dtype->bytes);
  size_t chunk = segment.slot_bytes() / dtype->bytes;
  // Before the first barrier, while other ranks may still compute.
  in.CopyTo(segment.slot(segment.rank()), std::min(chunk, total));
  std::string lost = segment.Barrier(name);
  if (!lost.empty()) return {Outcome::kLost, lost};

  const std::vector<int> active = ActiveRanks(segment);
  const Call mine = Summarize(segment, active);
  if (!active.empty()) {
    total = mine.elements;
    dtype = FindDtype(static_cast<tensorflow::DataType>(mine.dtype));
    chunk = segment.slot_bytes() / dtype->bytes;
  }
  const bool has_links = segment.links() != nullptr;
  Hosts hosts(segment, name);
  // A mean is divided before it is rounded, as in one host: the sum of a host may exceed
  // the range of float16.
  const double in_host = has_links && mine.is_mean ? segment.size() : 1;
  if (has_links && !mine.has_differences) {
    SumPart(segment, active, *dtype, std::min(chunk, total), in_host);
  }
  lost = hosts.ExchangeCalls(mine);
  if (!lost.empty()) return {Outcome::kLost, lost};
  if (hosts.active() == 0) return {Outcome::kAllJoined, "", hosts.last_joined()};
  if (hosts.have_differences()) {
    std::string text;
    lost = DescribeMismatch(segment, hosts, active,
                            reduction ? reduction->describe() : "", &text);
    return lost.empty() ? Report{Outcome::kMismatch, text} : Report{Outcome::kLost, lost};
  }
  const Call& call = hosts.first_active();
  const double divisor = call.is_mean ? hosts.active() : 1;
  const double between_hosts = call.is_mean ? divisor / segment.size() : divisor;
  total = call.elements;
  dtype = FindDtype(static_cast<tensorflow::DataType>(call.dtype));
  chunk = segment.slot_bytes() / dtype->bytes;
  // Ranks that are missing from a barrier after it have called the reduction.
  const std::string exchange = (has_links ? "the exchange between hosts of " : "") + name;
  size_t done = 0;
  // Once also for no elements: a rank that has read the members enters the barrier that
  // lets their owners overwrite them.
  do {
    const size_t elements = std::min(chunk, total - done);
    if (done > 0) {
      if (reduction) in.CopyTo(segment.slot(segment.rank()), elements);
      // Sums overwrite the result after this barrier, which each rank enters when it
      // has copied the previous ones.
      lost = segment.Barrier(name);
      if (!lost.empty()) return {Outcome::kLost, lost};
    }
    if (!has_links || done > 0) {
      SumPart(segment, active, *dtype, elements, has_links ? in_host : divisor);
    }
    lost = hosts.Sum(*dtype, elements, between_hosts);
    if (lost.empty()) lost = segment.Barrier(exchange);
    if (!lost.empty()) return {Outcome::kLost, lost};
    if (reduction) out.CopyFrom(segment.result(), elements);
    done += elements;
  } while (done < total);
  return {Outcome::kReduced, ""};
}

Report Allgather(Segment& segment, const Gathering& gathering) {
  // Without elements: the comparison of what the ranks have called.
  const Reduction comparison{gathering.name, gathering.signature, gathering.describe,
                             tensorflow::DT_FLOAT, false, {}};
  const Report report = Allreduce(segment, &comparison);
  if (report.outcome != Outcome::kReduced) return report;
  const int rank = segment.rank(), size = segment.size();
  // Members are written again by the next collective only.
  if (ActiveRanks(segment).size() < static_cast<size_t>(size)) {
    return {Outcome::kMismatch, gathering.describe() + "; another rank: join"};
  }
  const std::vector<size_t> totals = Totals(gathering.pieces);
  const size_t total = *std::max_element(totals.begin(), totals.end());
  const size_t chunk = segment.slot_bytes() / gathering.element_bytes;
  std::vector<Cursor> cursors;
  for (const auto& pieces : gathering.pieces) {
    cursors.emplace_back(pieces, gathering.element_bytes);
  }
  for (size_t done = 0; done < total; done += chunk) {
    const auto elements = [&](int other) {
      return totals[other] > done ? std::min(chunk, totals[other] - done) : 0;
    };
    cursors[rank].CopyTo(segment.slot(rank), elements(rank));
    std::string lost = segment.Barrier(gathering.name);
    if (!lost.empty()) return {Outcome::kLost, lost};
    for (int other = 0; other < size; ++other) {
      if (other != rank) cursors[other].CopyFrom(segment.slot(other), elements(other));
    }
    // No rank overwrites its slot before all have read it.
    lost = segment.Barrier(gathering.name);
    if (!lost.empty()) return {Outcome::kLost, lost};
  }
  CopyOwn(gathering.pieces[rank], gathering.element_bytes);
  return {Outcome::kReduced, ""};
}

}  // namespace hvdtrain
