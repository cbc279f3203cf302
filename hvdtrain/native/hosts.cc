#include "hosts.h"

#include <algorithm>

namespace hvdtrain {
namespace {

constexpr size_t kLineBytes = 128;

size_t Start(Range range, int number, int parts, size_t element_bytes) {
  if (number == parts) return range.second;
  const size_t line = kLineBytes / element_bytes;
  return range.first + (range.second - range.first) * number / parts / line * line;
}

}  // namespace

Range Part(Range range, int number, int parts, size_t element_bytes) {
  return {Start(range, number, parts, element_bytes),
          Start(range, number + 1, parts, element_bytes)};
}

Hosts::Hosts(Segment& segment, const std::string& name)
    : segment_(segment),
      name_(name),
      host_(segment.links() ? segment.links()->host() : 0),
      calls_(segment.links() ? segment.links()->hosts() : 1) {}

std::string Hosts::ExchangeCalls(const Call& mine) {
  calls_[host_] = mine;
  if (count() == 1) return "";
  Links& links = *segment_.links();
  links.idle_rounds = mine.active > 0 ? 0 : links.idle_rounds + 1;
  calls_[host_].idle_rounds = links.idle_rounds;
  std::vector<Transfer> transfers(count());
  for (int host = 0; host < count(); ++host) {
    if (host == host_) continue;
    Transfer& transfer = transfers[host];
    transfer.out = {{reinterpret_cast<char*>(&calls_[host_]), sizeof(Call)}};
    if (const size_t elements = FirstElements(mine)) {
      const size_t bytes = FindDtype(static_cast<tensorflow::DataType>(mine.dtype))->bytes;
      transfer.out.push_back(PartIn(segment_.result(), host, elements, bytes));
    }
    transfer.in = {{reinterpret_cast<char*>(&calls_[host]), sizeof(Call)}};
    // What follows depends on the call of that host, also where it is another one.
    transfer.then_receive = [this, &links, host]() -> Block {
      const size_t elements = FirstElements(calls_[host]);
      if (elements == 0) return {nullptr, 0};
      const auto type = static_cast<tensorflow::DataType>(calls_[host].dtype);
      const size_t bytes = FindDtype(type)->bytes;
      const Range part = PartOf(host_, elements, bytes);
      return links.Buffer(host, (part.second - part.first) * bytes);
    };
  }
  has_first_chunk_ = true;
  const std::string lost = Exchange(std::move(transfers));
  if (lost.empty() && active() == 0) links.idle_rounds = 0;
  return lost;
}

int Hosts::active() const {
  int active = 0;
  for (const Call& call : calls_) active += call.active;
  return active;
}

const Call& Hosts::first_active() const {
  return *std::find_if(calls_.begin(), calls_.end(),
                       [](const Call& call) { return call.active > 0; });
}

bool Hosts::have_differences() const {
  return std::any_of(calls_.begin(), calls_.end(), [this](const Call& call) {
    return call.active > 0 &&
           (call.has_differences || call.signature != first_active().signature);
  });
}

int Hosts::last_joined() const {
  // Of the host that has been without an active rank for the fewest rounds. The clocks
  // of hosts, which differ a little, decide only where no reduction was in between.
  const auto joined_earlier = [](const Call& one, const Call& other) {
    return std::make_pair(other.idle_rounds, one.joined_at) <
           std::make_pair(one.idle_rounds, other.joined_at);
  };
  return std::max_element(calls_.begin(), calls_.end(), joined_earlier)->last_joined;
}

std::string Hosts::Sum(const Dtype& dtype, size_t elements, double divisor) {
  if (count() == 1) return "";
  const bool is_first = std::exchange(has_first_chunk_, false);
  const Block own = PartIn(segment_.result(), host_, elements, dtype.bytes);
  std::vector<Transfer> partial(count()), complete(count());
  std::vector<const char*> sources;
  for (int host = 0; host < count(); ++host) {
    const bool is_active = calls_[host].active > 0;
    if (host == host_) {
      if (is_active) sources.push_back(own.data);
      continue;
    }
    const Block other = PartIn(segment_.result(), host, elements, dtype.bytes);
    if (is_active) {
      // Where ExchangeCalls has received the first chunk.
      const Block received = segment_.links()->Buffer(host, own.bytes);
      sources.push_back(received.data);
      partial[host].in = {received};
    }
    if (calls_[host_].active > 0) partial[host].out = {other};
    complete[host] = {{own}, {other}, nullptr};
  }
  const std::string lost = is_first ? "" : Exchange(std::move(partial));
  if (!lost.empty()) return lost;
  // In the order of hosts, by one host: all ranks get the same bits.
  dtype.sum(sources, 0, own.bytes / dtype.bytes, divisor, own.data);
  return Exchange(std::move(complete));
}

std::string Hosts::ExchangeTexts(const std::string& mine,
                                 std::vector<std::string>* texts) {
  texts->resize(count());
  (*texts)[host_] = mine;
  std::vector<uint64_t> bytes(count(), mine.size());
  std::vector<Transfer> transfers(count());
  for (int host = 0; host < count(); ++host) {
    if (host == host_) continue;
    Transfer& transfer = transfers[host];
    transfer.out = {{reinterpret_cast<char*>(&bytes[host_]), sizeof(uint64_t)},
                    {(*texts)[host_].data(), mine.size()}};
    transfer.in = {{reinterpret_cast<char*>(&bytes[host]), sizeof(uint64_t)}};
    transfer.then_receive = [&bytes, texts, host]() -> Block {
      std::string& text = (*texts)[host];
      text.resize(bytes[host]);
      return {text.data(), text.size()};
    };
  }
  return Exchange(std::move(transfers));
}

Range Hosts::PartOf(int host, size_t elements, size_t element_bytes) const {
  const Range rank =
      Part({0, elements}, segment_.rank(), segment_.size(), element_bytes);
  return Part(rank, host, count(), element_bytes);
}

Block Hosts::PartIn(char* chunk, int host, size_t elements, size_t element_bytes) const {
  const Range part = PartOf(host, elements, element_bytes);
  return {chunk + part.first * element_bytes, (part.second - part.first) * element_bytes};
}

size_t Hosts::FirstElements(const Call& call) const {
  if (call.active == 0 || call.has_differences) return 0;
  const Dtype* dtype = FindDtype(static_cast<tensorflow::DataType>(call.dtype));
  return std::min<size_t>(call.elements, segment_.slot_bytes() / dtype->bytes);
}

std::string Hosts::Exchange(std::vector<Transfer> transfers) {
  if (count() == 1) return "";
  const std::string lost =
      segment_.links()->Exchange(std::move(transfers), segment_, name_);
  return lost.empty() ? "" : segment_.Lose(lost);
}

}  // namespace hvdtrain
