#include "gathering.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hosts.h"
#include "links.h"
#include "rounds.h"

namespace hvdtrain {
namespace {

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

// Sends this rank's chunk, in its slot, to its peers on other hosts, and receives theirs.
std::string ExchangeChunk(Segment& segment, const Gathering& gathering,
                          const std::vector<size_t>& counts,
                          std::vector<Block>* received) {
  const Spread& spread = segment.spread();
  std::vector<Message> messages;
  for (int host = 0; host < spread.hosts; ++host) {
    const int rank = spread.rank(host, spread.place);
    const size_t bytes = counts[rank] * gathering.element_bytes;
    Block& block = (*received)[host];
    block = host == spread.host ? Block{segment.slot(segment.rank()), bytes}
                                : segment.links()->Buffer(host, bytes);
    messages.push_back({{}, [&block](int) { return block; }});
  }
  return GatherMessages(segment, gathering.name, Stage::kSums, messages);
}

// Copies a chunk of each rank, which has `counts` elements, to the tensors.
std::string GatherChunk(Segment& segment, const Gathering& gathering,
                        const std::vector<size_t>& counts, std::vector<Cursor>& cursors) {
  const Spread& spread = segment.spread();
  const int own = segment.number(segment.rank());
  char* const slot = segment.slot(segment.rank());
  // The comparison had no elements, which another rank could still read.
  cursors[own].CopyTo(slot, counts[own]);
  // While the ranks of this host read the slot.
  std::vector<Block> received(spread.hosts, {nullptr, 0});
  std::string lost = ExchangeChunk(segment, gathering, counts, &received);
  for (int turn = 0; turn < spread.hosts && lost.empty(); ++turn) {
    // Slots have what is of one host after the other, this one first.
    const int host = (spread.host + turn) % spread.hosts;
    if (turn > 0) memcpy(slot, received[host].data, received[host].bytes);
    lost = segment.Barrier(spread.hosts > 1 ? ExchangeOf(gathering.name) : gathering.name);
    if (!lost.empty()) break;
    for (int place = 0; place < segment.size(); ++place) {
      const int rank = spread.rank(host, place);
      if (rank != own) cursors[rank].CopyFrom(segment.slot(place), counts[rank]);
    }
    // No rank overwrites its slot before all have read it.
    lost = segment.Barrier(gathering.name);
  }
  return lost;
}

}  // namespace

Report Allgather(Segment& segment, const Gathering& gathering) {
  // Without elements: the comparison of what the ranks have called.
  const Reduction comparison{gathering.name, gathering.signature, gathering.describe,
                             tensorflow::DT_FLOAT, false, {}};
  const Report report = Allreduce(segment, &comparison);
  if (report.outcome != Outcome::kReduced) return report;
  if (report.active < segment.spread().job_size()) {
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
    std::vector<size_t> counts;
    for (size_t each : totals) {
      counts.push_back(std::min(chunk, each - std::min(each, done)));
    }
    const std::string lost = GatherChunk(segment, gathering, counts, cursors);
    if (!lost.empty()) return {Outcome::kLost, lost};
  }
  CopyOwn(gathering.pieces[segment.number(segment.rank())], gathering.element_bytes);
  return {Outcome::kReduced, ""};
}

}  // namespace hvdtrain
