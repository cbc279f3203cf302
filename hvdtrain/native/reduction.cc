#include "reduction.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace hvdtrain {
namespace {

// Parts that different ranks compute share no cache line.
constexpr size_t kLineBytes = 128;

// A longer description of a mismatched collective is shortened.
constexpr size_t kShownBytes = 320;

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

// Collects the texts of the active ranks, in pieces that fit into a member. Returns the
// reason if a rank is lost.
std::string GatherTexts(Segment& segment, const std::vector<int>& active,
                        const std::string& mine, std::vector<std::string>* texts) {
  texts->resize(active.size());
  bool has_more = true;
  for (size_t start = 0; has_more; start += kTextBytes - 1) {
    snprintf(segment.mine().text, kTextBytes, "%s",
             start < mine.size() ? mine.c_str() + start : "");
    std::string lost = segment.Barrier("the comparison of reductions");
    if (!lost.empty()) return lost;
    has_more = false;
    for (size_t i = 0; i < active.size(); ++i) {
      const char* const text = segment.member(active[i]).text;
      (*texts)[i] += text;
      has_more = has_more || strlen(text) == kTextBytes - 1;
    }
    // No rank may write its next text before all have read this one.
    lost = segment.Barrier("the comparison of reductions");
    if (!lost.empty()) return lost;
  }
  return "";
}

// The position of the first word, ended by a space, in which the texts differ.
size_t FirstDifference(const std::vector<std::string>& texts) {
  size_t same = 0;
  while (same < texts[0].size() &&
         std::all_of(texts.begin(), texts.end(), [&](const std::string& text) {
           return text[same] == texts[0][same];
         })) {
    ++same;
  }
  const size_t space = same == 0 ? std::string::npos : texts[0].rfind(' ', same - 1);
  return space == std::string::npos ? 0 : space + 1;
}

// Leaves out of a long text the words before the first that differs, but for the
// beginning, and most of those after it: a model may have a thousand tensors.
std::string Shorten(const std::string& text, size_t difference) {
  if (text.size() <= kShownBytes) return text;
  size_t head = text.rfind(' ', kShownBytes / 2);
  if (head == std::string::npos || head >= difference) head = difference;
  std::string shown = text.substr(0, head);
  if (head < difference) {
    const auto words = std::count(text.begin() + head + 1, text.begin() + difference, ' ');
    shown += " (" + std::to_string(words) + " more, alike) ";
  }
  const size_t end = text.find(' ', difference + kShownBytes / 2);
  shown += text.substr(difference, end == std::string::npos ? end : end - difference);
  return end == std::string::npos ? shown : shown + " ...";
}

// Returns to every rank what each has called. Every rank gets here, since all compare
// the same signatures.
Report Mismatch(Segment& segment, const std::vector<int>& active,
                const Reduction* reduction) {
  std::vector<std::string> texts;
  const std::string lost =
      GatherTexts(segment, active, reduction ? reduction->describe() : "", &texts);
  if (!lost.empty()) return {Outcome::kLost, lost};
  const size_t difference = FirstDifference(texts);
  std::string sent;
  for (size_t i = 0; i < active.size(); ++i) {
    sent += (i == 0 ? "rank " : "; rank ") + std::to_string(active[i]) + ": " +
            Shorten(texts[i], difference);
  }
  return {Outcome::kMismatch, sent};
}

// The first element of the part of a chunk that `rank` computes.
size_t PartStart(size_t elements, int rank, int size, size_t element_bytes) {
  if (rank == size) return elements;
  const size_t line = kLineBytes / element_bytes;
  return elements * rank / size / line * line;
}

void SumPart(Segment& segment, const std::vector<int>& active, const Dtype& dtype,
             bool is_mean, size_t elements) {
  const int rank = segment.rank(), size = segment.size();
  const size_t start = PartStart(elements, rank, size, dtype.bytes);
  const size_t end = PartStart(elements, rank + 1, size, dtype.bytes);
  std::vector<const char*> slots;
  for (int other : active) slots.push_back(segment.slot(other));
  const int divisor = is_mean ? active.size() : 1;
  dtype.sum(slots, start, end - start, divisor, segment.result());
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
  if (active.empty()) return {Outcome::kAllJoined, ""};
  if (!Agree(segment, active)) return Mismatch(segment, active, reduction);
  const Member& any = segment.member(active[0]);
  const bool is_mean = any.is_mean;
  if (!reduction) {
    total = any.elements;
    dtype = FindDtype(static_cast<tensorflow::DataType>(any.dtype));
    chunk = segment.slot_bytes() / dtype->bytes;
  }
  size_t done = 0;
  // Once also for no elements: a rank that has read the members enters the barrier that
  // lets their owners overwrite them.
  do {
    if (done > 0) {
      if (reduction) {
        in.CopyTo(segment.slot(segment.rank()), std::min(chunk, total - done));
      }
      // Sums overwrite the result after this barrier, which each rank enters when it
      // has copied the previous ones.
      lost = segment.Barrier(name);
      if (!lost.empty()) return {Outcome::kLost, lost};
    }
    const size_t elements = std::min(chunk, total - done);
    SumPart(segment, active, *dtype, is_mean, elements);
    lost = segment.Barrier(name);
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
