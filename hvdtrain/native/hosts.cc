#include "hosts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "rounds.h"

namespace hvdtrain {
namespace {

// Bytes that a rank adds up with its peers, up to which a way is chosen. Measured between
// 2, 4 and 8 hosts that are network namespaces of one machine; docs/figures/index.md has
// the commands.
//
// kGather saves one of two messages to each other host, 0.05 to 3 ms, and above
// kDirectHosts two of three times the rounds. With H hosts, a
// rank sends H-1 times its bytes in place of 2 (H-1)/H times: this limit is for what it
// sends, and takes 0.1 ms at 10 Gbit/s.
constexpr size_t kGatherBytes = 128 << 10;
// A ring has 2 (H-1) steps, each of which waits for a message. With larger blocks that is
// less than the time of the bytes, and no host gets the bytes of all others at a time,
// which would fill the buffers of a switch.
constexpr size_t kScatterBytes = 4 << 20;
// What a ring receives before it is added and sent on. 64 KiB to 2 MiB take the same time
// within the noise; 256 KiB stay in the second-level cache.
constexpr size_t kFragmentBytes = 256 << 10;

const Dtype& DtypeOf(const HostCall& call) {
  return *FindDtype(static_cast<tensorflow::DataType>(call.dtype));
}

Block BlockOf(char* data, size_t elements, int host, int hosts, const Dtype& dtype) {
  const Range range = Part({0, elements}, host, hosts, dtype.bytes);
  return {data + range.first * dtype.bytes, (range.second - range.first) * dtype.bytes};
}

}  // namespace

std::string ExchangeOf(const std::string& operation) {
  return "the exchange between hosts of " + operation;
}

Hosts::Hosts(Segment& segment, const std::string& name)
    : segment_(segment),
      name_(name),
      host_(segment.spread().host),
      calls_(segment.spread().hosts) {}

std::string Hosts::ExchangeCalls(const HostCall& mine, char* sums) {
  calls_[host_] = mine;
  if (segment_.links() != nullptr) {
    const std::string lost = ExchangeCallsOfHosts(mine, sums);
    if (!lost.empty()) return lost;
  }
  job_call_ = Conclude();
  if (job_call_.active == 0 && segment_.links()) segment_.links()->idle_rounds = 0;
  return segment_.parts() < segment_.size() ? Publish() : "";
}

std::string Hosts::Publish() {
  if (segment_.rank() == 0) segment_.job_call() = job_call_;
  // It is written again only after all ranks have entered another barrier.
  const bool is_limited = segment_.links() != nullptr;
  const std::string lost = segment_.Barrier(ExchangeOf(name_), is_limited);
  job_call_ = segment_.job_call();
  return lost;
}

std::string Hosts::ExchangeCallsOfHosts(const HostCall& mine, char* sums) {
  Links& links = *segment_.links();
  links.idle_rounds = mine.active > 0 ? 0 : links.idle_rounds + 1;
  calls_[host_].idle_rounds = links.idle_rounds;
  std::vector<Message> messages;
  for (int host = 0; host < count(); ++host) {
    char* const call = reinterpret_cast<char*>(&calls_[host]);
    // What follows depends on the call of that host, also where it is another one.
    const auto body = [this, &links, host, sums](int to) {
      const Block sent = Sent(calls_[host], to, sums);
      return host == host_ ? sent : links.Buffer(host, sent.bytes);
    };
    messages.push_back({{call, sizeof(HostCall)}, body});
  }
  return GatherMessages(segment_, name_, Stage::kCalls, messages);
}

JobCall Hosts::Conclude() const {
  JobCall job_call{};
  for (const HostCall& call : calls_) {
    if (call.active == 0) continue;
    if (job_call.active == 0) job_call.first = call;
    job_call.active += call.active;
    job_call.have_differences |=
        call.has_differences || call.signature != job_call.first.signature;
  }
  // Of the host that has been without an active rank for the fewest rounds. The clocks
  // of hosts, which differ a little, decide only where no reduction was in between.
  const auto joined_earlier = [](const HostCall& one, const HostCall& other) {
    return std::make_pair(other.idle_rounds, one.joined_at) <
           std::make_pair(one.idle_rounds, other.joined_at);
  };
  job_call.last_joined =
      std::max_element(calls_.begin(), calls_.end(), joined_earlier)->last_joined;
  return job_call;
}

bool Hosts::SendsSums(const HostCall& call) const {
  return call.active > 0 && !call.has_differences && !IsInWindows(call);
}

bool Hosts::IsInWindows(const HostCall& call) const {
  const Way way = WayOf(call);
  return way != Way::kGather && way != Way::kScatter;
}

Way Hosts::WayOf(const HostCall& call) const {
  const Dtype& dtype = DtypeOf(call);
  const size_t bytes = call.elements * dtype.bytes, own = bytes / segment_.parts();
  const bool fits = bytes <= segment_.slot_bytes();
  if (fits && (count() - 1) * own <= kGatherBytes) return Way::kGather;
  if (count() > kDirectHosts) return Way::kRounds;
  // In a ring, each host would round the sums of the ones before it.
  if (own > kScatterBytes && dtype.bytes >= 4) return Way::kRing;
  return fits ? Way::kScatter : Way::kScatterWindows;
}

Block Hosts::Sent(const HostCall& call, int host, char* data) const {
  if (!SendsSums(call)) return {nullptr, 0};
  const Dtype& dtype = DtypeOf(call);
  const Range part =
      Part({0, call.elements}, segment_.rank(), segment_.parts(), dtype.bytes);
  const size_t elements = part.second - part.first;
  if (WayOf(call) == Way::kGather) return {data, elements * dtype.bytes};
  return BlockOf(data, elements, host, count(), dtype);
}

std::string Hosts::Sum(const Dtype& dtype, char* data, size_t elements, double divisor) {
  if (segment_.links() == nullptr) return "";
  const Way way = WayOf(job_call_.first);
  if (way == Way::kRing || way == Way::kRounds) {
    // A host without active ranks passes on the sums of the others.
    const bool has_sums = calls_[host_].active > 0 || elements == 0;
    if (!has_sums) memset(data, 0, elements * dtype.bytes);
    return way == Way::kRing
               ? SumInRing(dtype, data, elements, divisor)
               : SumInRounds(segment_, name_, dtype, data, elements, divisor);
  }
  if (way != Way::kGather) {
    return SumBlocks(dtype, data, elements, divisor, way == Way::kScatter);
  }
  std::vector<const char*> sources;
  for (int host = 0; host < count(); ++host) {
    if (calls_[host].active == 0) continue;
    // Where ExchangeCalls has received them.
    sources.push_back(host == host_ ? data : segment_.links()->Buffer(host, 0).data);
  }
  dtype.sum(sources, elements, divisor, data);
  return "";
}

std::string Hosts::SumBlocks(const Dtype& dtype, char* data, size_t elements,
                             double divisor, bool are_received) {
  const Block own = BlockOf(data, elements, host_, count(), dtype);
  std::vector<Transfer> partial(count()), complete(count());
  std::vector<const char*> sources;
  for (int host = 0; host < count(); ++host) {
    const bool is_active = calls_[host].active > 0;
    if (host == host_) {
      if (is_active) sources.push_back(own.data);
      continue;
    }
    const Block other = BlockOf(data, elements, host, count(), dtype);
    if (is_active) {
      const Block received = segment_.links()->Buffer(host, own.bytes);
      sources.push_back(received.data);
      partial[host].in = {received};
    }
    if (calls_[host_].active > 0) partial[host].out = {other};
    complete[host] = {{own}, {other}, nullptr, nullptr};
  }
  const std::string lost =
      are_received ? "" : Exchange(std::move(partial), Stage::kSums);
  if (!lost.empty()) return lost;
  // In the order of hosts, by one host: all ranks get the same bits.
  dtype.sum(sources, own.bytes / dtype.bytes, divisor, own.data);
  return Exchange(std::move(complete), Stage::kSums);
}

std::string Hosts::SumInRing(const Dtype& dtype, char* data, size_t elements,
                             double divisor) {
  const Block fragment = segment_.links()->Buffer(host_, kFragmentBytes);
  Ring ring(host_, count(), dtype, data, elements, divisor, fragment);
  return Exchange(ring.Transfers(), Stage::kRelayedSums);
}

std::string Hosts::ExchangeTexts(const std::string& mine,
                                 std::vector<std::string>* texts) {
  texts->resize(count());
  (*texts)[host_] = mine;
  std::vector<uint64_t> bytes(count(), mine.size());
  std::vector<Message> messages;
  for (int host = 0; host < count(); ++host) {
    const auto body = [&bytes, texts, host](int) -> Block {
      std::string& text = (*texts)[host];
      text.resize(bytes[host]);
      return {text.data(), text.size()};
    };
    messages.push_back(
        {{reinterpret_cast<char*>(&bytes[host]), sizeof(uint64_t)}, body});
  }
  return GatherMessages(segment_, name_, Stage::kSums, messages);
}

std::string Hosts::Exchange(std::vector<Transfer> transfers, Stage stage) {
  return segment_.links()->Exchange(std::move(transfers), segment_, name_, stage);
}

}  // namespace hvdtrain
