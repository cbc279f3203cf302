#include "rounds.h"

#include <algorithm>
#include <utility>

#include "ring.h"

namespace hvdtrain {
namespace {

// When messages are gathered, host h has those of hosts h to h + skip - 1, and receives
// those of the `count` hosts from h + skip on, from that host. When sums are scattered, it
// sends the blocks of these hosts to it.
struct Round {
  int skip, count;
};

// The largest skip first. Messages are gathered in the opposite order.
std::vector<Round> Rounds(int hosts) {
  std::vector<Round> rounds;
  for (int known = hosts; known > 1;) {
    const int skip = (known + 1) / 2;
    rounds.push_back({skip, known - skip});
    known = skip;
  }
  return rounds;
}

// What all hosts send to each other in one round.
std::vector<Transfer> DirectTransfers(int host, const std::vector<Message>& messages) {
  const int hosts = messages.size();
  std::vector<Transfer> transfers(hosts);
  for (int other = 0; other < hosts; ++other) {
    if (other == host) continue;
    transfers[other].out = {messages[host].head, messages[host].body(other)};
    transfers[other].in = {messages[other].head};
    transfers[other].then_receive = [&messages, host, other, is_next = true]() mutable {
      if (!std::exchange(is_next, false)) return std::vector<Block>();
      return std::vector<Block>{messages[other].body(host)};
    };
  }
  return transfers;
}

// Of `count` hosts from `first` on.
std::vector<Block> Heads(const std::vector<Message>& messages, int first, int count) {
  std::vector<Block> heads;
  for (int i = 0; i < count; ++i) {
    heads.push_back(messages[(first + i) % messages.size()].head);
  }
  return heads;
}

std::vector<Block> Bodies(const std::vector<Message>& messages, int first, int count) {
  std::vector<Block> bodies;
  for (int i = 0; i < count; ++i) {
    const int host = (first + i) % messages.size();
    // The same for all receivers.
    bodies.push_back(messages[host].body(host));
  }
  return bodies;
}

std::vector<Transfer> RoundTransfers(int host, Round round,
                                     const std::vector<Message>& messages) {
  const int hosts = messages.size();
  std::vector<Transfer> transfers(hosts);
  const int from = (host + round.skip) % hosts;
  std::vector<Block>& out = transfers[(host - round.skip + hosts) % hosts].out;
  out = Heads(messages, host, round.count);
  const std::vector<Block> bodies = Bodies(messages, host, round.count);
  out.insert(out.end(), bodies.begin(), bodies.end());
  transfers[from].in = Heads(messages, from, round.count);
  transfers[from].then_receive = [&messages, from, round, is_next = true]() mutable {
    if (!std::exchange(is_next, false)) return std::vector<Block>();
    return Bodies(messages, from, round.count);
  };
  return transfers;
}

// The blocks of all hosts, one after the other in memory.
class Blocks {
 public:
  // The `elements` at `data` have `element_bytes` each, and are divided as those of the
  // dtype are.
  Blocks(char* data, size_t elements, size_t element_bytes, int hosts,
         const Dtype& dtype)
      : data_(data),
        elements_(elements),
        element_bytes_(element_bytes),
        hosts_(hosts),
        dtype_(dtype) {}

  Block Of(int host) const { return Piece(host, host + 1); }

  // Those of `count` hosts from `first` on, which are at most two pieces of memory.
  std::vector<Block> Of(int first, int count) const {
    first %= hosts_;
    const int end = first + count;
    std::vector<Block> blocks = {Piece(first, std::min(end, hosts_))};
    if (end > hosts_) blocks.push_back(Piece(0, end - hosts_));
    return blocks;
  }

 private:
  Block Piece(int first, int end) const {
    const size_t start = PartOf(first).first * element_bytes_;
    return {data_ + start, PartOf(end - 1).second * element_bytes_ - start};
  }

  Range PartOf(int host) const {
    return Part({0, elements_}, host, hosts_, dtype_.bytes);
  }

  char* const data_;
  const size_t elements_, element_bytes_;
  const int hosts_;
  const Dtype& dtype_;
};

size_t Bytes(const std::vector<Block>& blocks) {
  size_t bytes = 0;
  for (const Block& block : blocks) bytes += block.bytes;
  return bytes;
}

}  // namespace

bool AreConnected(int hosts, int one, int other) {
  if (one == other) return false;
  if (hosts <= kDirectHosts) return true;
  const int distance = (one - other + hosts) % hosts;
  const std::vector<Round> rounds = Rounds(hosts);
  return std::any_of(rounds.begin(), rounds.end(), [&](const Round& round) {
    return distance == round.skip || distance == hosts - round.skip;
  });
}

std::string GatherMessages(Segment& segment, const std::string& operation, Stage stage,
                           const std::vector<Message>& messages) {
  const int host = segment.spread().host, hosts = messages.size();
  if (hosts == 1) return "";
  Links& links = *segment.links();
  if (hosts <= kDirectHosts) {
    return links.Exchange(DirectTransfers(host, messages), segment, operation, stage);
  }
  std::vector<Round> rounds = Rounds(hosts);
  std::reverse(rounds.begin(), rounds.end());
  for (const Round& round : rounds) {
    const std::string lost =
        links.Exchange(RoundTransfers(host, round, messages), segment, operation,
                       round.skip == 1 ? stage : Relayed(stage));
    if (!lost.empty()) return lost;
  }
  return "";
}

std::string SumInRounds(Segment& segment, const std::string& operation,
                        const Dtype& dtype, char* data, size_t elements,
                        double divisor) {
  Links& links = *segment.links();
  const int host = segment.spread().host, hosts = segment.spread().hosts;
  char* sums = data;
  if (dtype.partial_bytes != dtype.bytes) {
    sums = links.Buffer(host, elements * dtype.partial_bytes).data;
    dtype.to_partial({data}, elements, 1, sums);
  }
  const Blocks partial(sums, elements, dtype.partial_bytes, hosts, dtype);
  const Blocks complete(data, elements, dtype.bytes, hosts, dtype);
  for (const Round& round : Rounds(hosts)) {
    const int from = (host - round.skip + hosts) % hosts;
    const std::vector<Block> own = partial.Of(host, round.count);
    const Block received = links.Buffer(from, Bytes(own));
    std::vector<Transfer> transfers(hosts);
    transfers[(host + round.skip) % hosts].out =
        partial.Of(host + round.skip, round.count);
    transfers[from].in = {received};
    const std::string lost =
        links.Exchange(std::move(transfers), segment, operation, Stage::kRelayedSums);
    if (!lost.empty()) return lost;
    const char* next = received.data;
    for (const Block& block : own) {
      const size_t count = block.bytes / dtype.partial_bytes;
      if (round.skip > 1) {
        dtype.sum_partials({block.data, next}, count, 1, block.data);
      } else {
        dtype.from_partials({block.data, next}, count, divisor,
                            complete.Of(host).data);
      }
      next += block.bytes;
    }
  }
  std::vector<Message> messages;
  for (int other = 0; other < hosts; ++other) {
    messages.push_back({{}, [&complete, other](int) { return complete.Of(other); }});
  }
  return GatherMessages(segment, operation, Stage::kSums, messages);
}

}  // namespace hvdtrain
