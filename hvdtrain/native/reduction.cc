#include "reduction.h"

#include <algorithm>
#include <cstring>

#include "hosts.h"
#include "mismatch.h"

namespace hvdtrain {
namespace {

// Of a rank's part of large tensors that hosts exchange at a time.
constexpr size_t kWindowBytes = 16 << 20;
// Bytes that a rank may read in addition, to save a barrier: a guess of how many take as
// long.
constexpr size_t kReadBytes = 16 << 10;

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

// What the ranks of this host have called.
HostCall Summarize(Segment& segment, const std::vector<int>& active) {
  HostCall call{};
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

// The elements of a chunk that this rank adds up.
Range OwnPart(Segment& segment, const Dtype& dtype, size_t elements) {
  if (segment.rank() >= segment.parts()) return {elements, elements};
  return Part({0, elements}, segment.rank(), segment.parts(), dtype.bytes);
}

// Adds this rank's part of what the active ranks of its host have in their slots, and
// writes it to `sums`.
void SumPart(Segment& segment, const std::vector<int>& active, const Dtype& dtype,
             Range part, double divisor, char* sums) {
  if (active.empty() || part.first == part.second) return;
  std::vector<const char*> slots;
  const size_t start = part.first * dtype.bytes;
  for (int other : active) slots.push_back(segment.slot(other) + start);
  dtype.sum(slots, part.second - part.first, divisor, sums);
}

// The tensors of this rank, which has none after it has joined.
struct Tensors {
  Cursor in, out;
  const std::string& name;
  const bool has_any;
};

// What the ranks have agreed on.
struct Agreed {
  const Dtype& dtype;
  const size_t elements;
  const std::vector<int>& active;  // ranks of this host
  // Of the sum of all ranks, and the part of it that the ranks of a host divide by.
  const double divisor, in_host;
};

// What the ranks of a host divide a sum by before hosts exchange it. A mean is divided
// before it is rounded, as in one host: the sum of a host may exceed the range of
// float16. All hosts divide by the same number.
double DivisorInHost(Segment& segment, const HostCall& call) {
  return call.is_mean ? segment.spread().largest : 1;
}

// Adds this rank's part of its host's sums where they are sent with the call, and returns
// where they are.
char* SumToSend(Segment& segment, const Hosts& hosts, const HostCall& mine,
                const std::vector<int>& active) {
  if (segment.links() == nullptr || !hosts.SendsSums(mine)) return segment.result();
  const Dtype& dtype = *FindDtype(static_cast<tensorflow::DataType>(mine.dtype));
  const Range part = OwnPart(segment, dtype, mine.elements);
  char* const sums = segment.result() + part.first * dtype.bytes;
  SumPart(segment, active, dtype, part, DivisorInHost(segment, mine), sums);
  return sums;
}

// A barrier after the calls were exchanged.
std::string BarrierOfExchange(Segment& segment, const Tensors& tensors) {
  return segment.Barrier(ExchangeOf(tensors.name), segment.links() != nullptr);
}

// Whether each rank adds up all elements, from what all others have written to their
// slots. Two ranks read as much from each other as if each added its part, and copy less.
bool IsRedundant(const Segment& segment, size_t bytes) {
  const size_t additional = bytes * std::max(0, segment.size() - 2);
  return segment.spread().hosts == 1 && additional <= kReadBytes;
}

// Bytes of a slot that a rank fills at a time: half of it where other ranks may still
// read the other half.
size_t ChunkBytes(const Segment& segment, size_t bytes) {
  const bool is_half = bytes > segment.slot_bytes() && IsRedundant(segment, bytes);
  return is_half ? segment.slot_bytes() / 2 : segment.slot_bytes();
}

// Adds up a chunk that is at `offset` of the ranks' slots.
void SumAll(Segment& segment, const Agreed& agreed, Tensors& tensors, size_t elements,
            size_t offset) {
  std::vector<const char*> inputs(agreed.active.size());
  tensors.out.Advance(elements, [&](const Piece& piece, size_t start, size_t bytes) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const int rank = agreed.active[i];
      inputs[i] =
          rank == segment.rank() ? piece.input + start : segment.slot(rank) + offset;
    }
    if (piece.output != nullptr) {
      agreed.dtype.sum(inputs, bytes / agreed.dtype.bytes, agreed.divisor,
                       piece.output + start);
    }
    offset += bytes;
  });
}

// Chunk by chunk, of which each rank adds up all elements.
std::string ReduceRedundantly(Segment& segment, const Agreed& agreed, Tensors& tensors) {
  const size_t bytes = agreed.dtype.bytes;
  const size_t chunk = ChunkBytes(segment, agreed.elements * bytes) / bytes;
  size_t offset = 0;
  for (size_t done = 0; done < agreed.elements; done += chunk) {
    const size_t elements = std::min(chunk, agreed.elements - done);
    if (done > 0) {
      offset = chunk * bytes - offset;
      if (tensors.has_any) {
        tensors.in.CopyTo(segment.slot(segment.rank()) + offset, elements);
      }
      const std::string lost = segment.Barrier(tensors.name);
      if (!lost.empty()) return lost;
    }
    if (tensors.has_any) SumAll(segment, agreed, tensors, elements, offset);
  }
  // Also without elements: the other ranks have read the members. The next reduction
  // waits for those that still read.
  segment.Arrive();
  return "";
}

// Chunk by chunk, of which each rank adds up its part.
std::string ReduceByParts(Segment& segment, const Agreed& agreed, Tensors& tensors) {
  const size_t bytes = agreed.dtype.bytes, chunk = segment.slot_bytes() / bytes;
  for (size_t done = 0; done < agreed.elements; done += chunk) {
    const size_t elements = std::min(chunk, agreed.elements - done);
    if (done > 0) {
      if (tensors.has_any) tensors.in.CopyTo(segment.slot(segment.rank()), elements);
      // Sums overwrite the result after this barrier, which each rank enters when it
      // has copied the previous ones.
      const std::string lost = segment.Barrier(tensors.name);
      if (!lost.empty()) return lost;
    }
    const Range part = OwnPart(segment, agreed.dtype, elements);
    SumPart(segment, agreed.active, agreed.dtype, part, agreed.divisor,
            segment.result() + part.first * bytes);
    const std::string lost = segment.Barrier(tensors.name);
    if (!lost.empty()) return lost;
    if (tensors.has_any) tensors.out.CopyFrom(segment.result(), elements);
  }
  return "";
}

// Tensors that are not large, whose sums have been exchanged with the calls.
std::string ReduceOnce(Segment& segment, Hosts& hosts, const Agreed& agreed,
                       Tensors& tensors) {
  const Range part = OwnPart(segment, agreed.dtype, agreed.elements);
  std::string lost =
      hosts.Sum(agreed.dtype, segment.result() + part.first * agreed.dtype.bytes,
                part.second - part.first, agreed.divisor / agreed.in_host);
  if (lost.empty()) lost = BarrierOfExchange(segment, tensors);
  if (lost.empty() && tensors.has_any) {
    tensors.out.CopyFrom(segment.result(), agreed.elements);
  }
  return lost;
}

// Adds this rank's parts of the chunks of a window, which it writes to `sums` one after
// the other. `is_first`: the first chunk is in the slots.
std::string GatherWindow(Segment& segment, const Agreed& agreed, Tensors& tensors,
                         size_t window, bool is_first, char* sums) {
  const size_t bytes = agreed.dtype.bytes, chunk = segment.slot_bytes() / bytes;
  for (size_t done = 0; done < window; done += chunk) {
    const size_t elements = std::min(chunk, window - done);
    const bool is_sum = segment.size() == 1 && agreed.in_host == 1;
    if (is_sum && tensors.has_any && (!is_first || done > 0)) {
      tensors.in.CopyTo(sums, window - done);
      return "";
    }
    if (!is_first || done > 0) {
      // Slots are overwritten after this barrier, and read after the next one.
      std::string lost = segment.Barrier(tensors.name);
      if (!lost.empty()) return lost;
      if (tensors.has_any) tensors.in.CopyTo(segment.slot(segment.rank()), elements);
      lost = segment.Barrier(tensors.name);
      if (!lost.empty()) return lost;
    }
    const Range part = OwnPart(segment, agreed.dtype, elements);
    SumPart(segment, agreed.active, agreed.dtype, part, agreed.in_host, sums);
    sums += (part.second - part.first) * bytes;
  }
  return "";
}

// Copies the sums of a window, this rank's part of which is at `sums`, to the tensors.
std::string SpreadWindow(Segment& segment, const Agreed& agreed, Tensors& tensors,
                         size_t window, const char* sums) {
  if (segment.size() == 1) {
    if (tensors.has_any) tensors.out.CopyFrom(sums, window);
    return "";
  }
  const size_t bytes = agreed.dtype.bytes, chunk = segment.slot_bytes() / bytes;
  for (size_t done = 0; done < window; done += chunk) {
    const size_t elements = std::min(chunk, window - done);
    const Range part = OwnPart(segment, agreed.dtype, elements);
    const size_t count = (part.second - part.first) * bytes;
    // Each rank enters this barrier when it has copied the previous result.
    std::string lost = BarrierOfExchange(segment, tensors);
    if (!lost.empty()) return lost;
    if (count > 0) memcpy(segment.result() + part.first * bytes, sums, count);
    sums += count;
    lost = BarrierOfExchange(segment, tensors);
    if (!lost.empty()) return lost;
    if (tensors.has_any) tensors.out.CopyFrom(segment.result(), elements);
  }
  return "";
}

// Large tensors, of which a rank exchanges its part in windows of many chunks: the more
// hosts there are, the smaller are the blocks that each of them adds up.
std::string ReduceWindows(Segment& segment, Hosts& hosts, const Agreed& agreed,
                          Tensors& tensors) {
  const size_t bytes = agreed.dtype.bytes, chunk = segment.slot_bytes() / bytes;
  const size_t chunks =
      std::max<size_t>(1, kWindowBytes * segment.parts() / segment.slot_bytes());
  const size_t window = chunks * chunk;
  for (size_t done = 0; done < agreed.elements; done += window) {
    const size_t elements = std::min(window, agreed.elements - done);
    size_t own = 0;
    for (size_t start = 0; start < elements; start += chunk) {
      const Range part =
          OwnPart(segment, agreed.dtype, std::min(chunk, elements - start));
      own += part.second - part.first;
    }
    // A rank without others on its host needs no copy.
    char* sums = segment.size() == 1 ? tensors.out.Output(elements) : nullptr;
    if (sums == nullptr && own > 0) sums = segment.links()->Window(own * bytes).data;
    std::string lost =
        GatherWindow(segment, agreed, tensors, elements, done == 0, sums);
    if (!lost.empty()) return lost;
    lost = hosts.Sum(agreed.dtype, sums, own, agreed.divisor / agreed.in_host);
    if (!lost.empty()) return lost;
    lost = SpreadWindow(segment, agreed, tensors, elements, sums);
    if (!lost.empty()) return lost;
  }
  return "";
}

// After the calls have been exchanged, and agree.
std::string ReduceCalled(Segment& segment, Hosts& hosts, const std::vector<int>& active,
                         Tensors& tensors) {
  const HostCall& call = hosts.job_call().first;
  const double divisor = call.is_mean ? hosts.job_call().active : 1;
  const Agreed agreed{*FindDtype(static_cast<tensorflow::DataType>(call.dtype)),
                      call.elements, active, divisor, DivisorInHost(segment, call)};
  if (IsRedundant(segment, agreed.elements * agreed.dtype.bytes)) {
    return ReduceRedundantly(segment, agreed, tensors);
  }
  if (segment.spread().hosts == 1) return ReduceByParts(segment, agreed, tensors);
  return hosts.IsInWindows(call) ? ReduceWindows(segment, hosts, agreed, tensors)
                                 : ReduceOnce(segment, hosts, agreed, tensors);
}

}  // namespace

Report Allreduce(Segment& segment, const Reduction* reduction) {
  if (!segment.lost().empty()) return {Outcome::kLost, segment.lost()};
  const std::string name = reduction ? reduction->name : "join";
  // Other ranks may still read what this one has written in the previous reduction.
  std::string lost = segment.Await(name);
  if (!lost.empty()) return {Outcome::kLost, lost};
  static const std::vector<Piece> kNone;
  const std::vector<Piece>& pieces = reduction ? reduction->pieces : kNone;
  size_t total = 0;
  for (const Piece& piece : pieces) total += piece.elements;
  Publish(segment.mine(), reduction, total);
  // A rank that has joined has no elements of any dtype.
  const Dtype* dtype = FindDtype(reduction ? reduction->dtype : tensorflow::DT_FLOAT);
  Tensors tensors{Cursor(pieces, dtype->bytes), Cursor(pieces, dtype->bytes), name,
                  reduction != nullptr};
  // Before the first barrier, while other ranks may still compute.
  tensors.in.CopyTo(
      segment.slot(segment.rank()),
      std::min(ChunkBytes(segment, total * dtype->bytes) / dtype->bytes, total));
  lost = segment.Barrier(name);
  if (!lost.empty()) return {Outcome::kLost, lost};

  const std::vector<int> active = ActiveRanks(segment);
  const HostCall mine = Summarize(segment, active);
  Hosts hosts(segment, name);
  lost = hosts.ExchangeCalls(mine, SumToSend(segment, hosts, mine, active));
  if (!lost.empty()) return {Outcome::kLost, lost};
  const JobCall& job_call = hosts.job_call();
  if (job_call.active == 0) {
    return {Outcome::kAllJoined, "", job_call.last_joined};
  }
  if (job_call.have_differences) {
    std::string text;
    lost = DescribeMismatch(segment, hosts, active,
                            reduction ? reduction->describe() : "", &text);
    return lost.empty() ? Report{Outcome::kMismatch, text} : Report{Outcome::kLost, lost};
  }
  lost = ReduceCalled(segment, hosts, active, tensors);
  if (!lost.empty()) return {Outcome::kLost, lost};
  return {Outcome::kReduced, "", -1, static_cast<int>(job_call.active)};
}

}  // namespace hvdtrain
