#include "links.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <system_error>
#include <utility>

namespace hvdtrain {
namespace {

using Clock = std::chrono::steady_clock;

// As in a barrier: how often a rank that waits checks whether another one has failed.
constexpr std::chrono::milliseconds kCheckInterval(100);
// From when on a host that acknowledges nothing is lost. The kernel would wait for a
// quarter of an hour; it sends anew 25, 51 and 102 s after a cut, and a link that was
// down for 50 s must not end the job. TCP_USER_TIMEOUT ends connections to ranks that are
// only late, too: it counts the time in which a receiver's window is full.
constexpr uint32_t kLostMilliseconds = 90000;
// From when on messages about a wait name such a host. An idle link has a first probe
// after 10 s, which is acknowledged within its round trip.
constexpr uint32_t kDoubtMilliseconds = 11000;

// Whose sockets a child of this process closes.
std::atomic<const Links*> open_links{nullptr};

// The blocks of one direction that remain.
class Queue {
 public:
  explicit Queue(std::vector<Block> blocks) : blocks_(std::move(blocks)) { Skip(); }

  bool is_empty() const { return next_ == blocks_.size(); }
  size_t moved() const { return moved_; }
  void Add(Block block) {
    blocks_.push_back(block);
    Skip();
  }

  // Moves what the socket takes or has without blocking, up to `limit` bytes since the
  // start. Returns false when the connection has ended, with errno 0 where the other rank
  // has closed it.
  template <typename Call>
  bool Move(Call call, size_t limit = SIZE_MAX) {
    while (!is_empty() && moved_ < limit) {
      iovec vector[kBlocks];
      const int count = Fill(vector, limit - moved_);
      msghdr message{};
      message.msg_iov = vector;
      message.msg_iovlen = count;
      const ssize_t bytes = call(&message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (bytes < 0 && errno == EINTR) continue;
      if (bytes < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
      if (bytes == 0) {
        errno = 0;
        return false;
      }
      Advance(bytes);
    }
    return true;
  }

 private:
  static constexpr int kBlocks = 32;

  int Fill(iovec* vector, size_t limit) const {
    int count = 0;
    for (size_t i = next_; i < blocks_.size() && count < kBlocks && limit > 0; ++i) {
      const size_t bytes = std::min(blocks_[i].bytes, limit);
      vector[count++] = {blocks_[i].data, bytes};
      limit -= bytes;
    }
    return count;
  }

  void Advance(size_t bytes) {
    moved_ += bytes;
    while (bytes > 0) {
      Block& block = blocks_[next_];
      const size_t part = std::min(bytes, block.bytes);
      block.data += part;
      block.bytes -= part;
      bytes -= part;
      Skip();
    }
  }

  void Skip() {
    while (!is_empty() && blocks_[next_].bytes == 0) ++next_;
  }

  std::vector<Block> blocks_;
  size_t next_ = 0, moved_ = 0;
};

}  // namespace

// A transfer with one host.
class Links::Progress {
 public:
  Progress(int socket, Transfer transfer)
      : socket_(socket),
        out_(std::move(transfer.out)),
        in_(std::move(transfer.in)),
        then_receive_(std::move(transfer.then_receive)),
        ready_(transfer.ready),
        is_awaited_(!has_received()) {}

  bool is_complete() const { return out_.is_empty() && has_received(); }
  bool has_received() const { return in_.is_empty() && !then_receive_; }
  // Whether all has arrived, and there was something.
  bool has_come() const { return is_awaited_ && has_received(); }
  // Whether bytes of `out` may be sent since the last call of Send.
  bool is_fed() const { return ready_ != nullptr && may_send(); }
  // Whether the kernel takes no more of what may be sent, if Send was called before.
  bool may_send() const {
    return !out_.is_empty() && (ready_ == nullptr || out_.moved() < *ready_);
  }

  // Receives at most until `in` is empty, and then asks for more without receiving it, so
  // that what has become ready is sent first. Returns false when the connection has
  // ended.
  bool Receive() {
    const auto receive = [this](msghdr* message, int flags) {
      return recvmsg(socket_, message, flags);
    };
    if (!in_.Move(receive)) return false;
    while (in_.is_empty() && then_receive_) {
      const std::vector<Block> next = then_receive_();
      if (next.empty()) then_receive_ = nullptr;
      for (const Block& block : next) in_.Add(block);
    }
    return true;
  }

  // Returns false when the connection has ended.
  bool Send() {
    const auto send = [this](const msghdr* message, int flags) {
      return sendmsg(socket_, message, flags);
    };
    return out_.Move(send, ready_ == nullptr ? SIZE_MAX : *ready_);
  }

  // Whether the other host has not acknowledged for so long what was sent, or probes: of
  // a full window, or keepalive probes where nothing is on the way.
  bool IsSilent(uint32_t milliseconds) const {
    tcp_info info{};
    socklen_t size = sizeof(info);
    return !is_complete() &&
           getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
           (info.tcpi_unacked > 0 || info.tcpi_probes > 0) &&
           info.tcpi_last_ack_recv > milliseconds;
  }

  // -1 where nothing is wanted: the kernel would report that the other end has closed
  // the connection again and again.
  pollfd events() const {
    const int wanted = (has_received() ? 0 : POLLIN) | (may_send() ? POLLOUT : 0);
    return {wanted == 0 ? -1 : socket_, static_cast<short>(wanted), 0};
  }

 private:
  const int socket_;
  Queue out_, in_;
  std::function<std::vector<Block>()> then_receive_;
  const size_t* const ready_;
  const bool is_awaited_;
};

Stage Relayed(Stage stage) {
  const bool is_call = stage == Stage::kCalls || stage == Stage::kRelayedCalls;
  return is_call ? Stage::kRelayedCalls : Stage::kRelayedSums;
}

Links::Links(int host, std::vector<int> sockets, std::vector<int> ranks)
    : host_(host),
      process_(getpid()),
      sockets_(std::move(sockets)),
      ranks_(std::move(ranks)),
      buffers_(sockets_.size()) {
  // A child that outlives this process would keep its connections open, and other hosts
  // would not notice that it has ended.
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    if (const Links* links = open_links) links->CloseSockets();
  });
  if (registered != 0) throw std::system_error(registered, std::system_category());
  open_links = this;
}

Links::~Links() {
  // A child has closed them, and may use their numbers for other files.
  if (process_ != getpid()) return;
  const Links* own = this;
  open_links.compare_exchange_strong(own, nullptr);
  CloseSockets();
}

void Links::CloseSockets() const {
  for (int socket : sockets_) {
    if (socket >= 0) close(socket);
  }
}

Block Links::Buffer(int host, size_t bytes) {
  std::vector<char>& buffer = buffers_[host];
  if (buffer.size() < bytes) buffer.resize(bytes);
  return {buffer.data(), bytes};
}

Block Links::Window(size_t bytes) {
  if (window_.size() < bytes) window_.resize(bytes);
  return {window_.data(), bytes};
}

void Links::Close() {
  // Not close(): a kernel of this process may wait for the socket.
  for (int socket : sockets_) {
    if (socket >= 0) shutdown(socket, SHUT_RDWR);
  }
}

std::string Links::Exchange(std::vector<Transfer> transfers, Segment& segment,
                            const std::string& operation, Stage stage) {
  const std::string lost = Run(std::move(transfers), segment, operation, stage);
  return lost.empty() ? "" : segment.Lose(lost);
}

std::string Links::Run(std::vector<Transfer> transfers, Segment& segment,
                       const std::string& operation, Stage stage) {
  std::vector<Progress> progress;
  for (int host = 0; host < hosts(); ++host) {
    progress.emplace_back(sockets_[host], std::move(transfers[host]));
  }
  // At first each host may have sent something, and something may be sent to it.
  std::vector<pollfd> events(hosts(), {-1, 0, POLLIN | POLLOUT});
  const Limits& limits = segment.limits();
  // A rank that waits for a call itself knows which one is missing, and is to say so
  // before those do that wait for it.
  const double patience = stage == Stage::kRelayedCalls ? 1.5 : 1;
  bool has_warned = limits.warning.count() == 0;
  const auto start = Clock::now();
  auto now = start, last = start, checked = start;
  while (true) {
    const std::string ended = Advance(progress, events);
    if (!ended.empty()) return ended;
    if (std::all_of(progress.begin(), progress.end(),
                    [](const Progress& each) { return each.is_complete(); })) {
      return "";
    }
    const bool has_moved = Wait(progress, events, now - start < limits.spin);
    now = Clock::now();
    if (has_moved) last = now;
    // By the clock: one host that sends a little must not hide a failure of another.
    if (now - checked < kCheckInterval) continue;
    checked = now;
    // For the ranks of this host that wait for this one.
    if (now - last < kCheckInterval) segment.mine().progress.fetch_add(1);
    const std::string reason = Failure(progress, segment);
    if (!reason.empty()) return reason;
    if (!has_warned && now - last > limits.warning * patience) {
      has_warned = true;
      Warn(progress, segment, operation, stage);
    }
    if (limits.failure.count() && now - last > limits.failure * patience) {
      const int silent = Silent(progress, kDoubtMilliseconds);
      return silent < hosts() ? Ended(silent, ETIMEDOUT)
                              : Late(progress, segment, operation, stage);
    }
  }
}

bool Links::Wait(const std::vector<Progress>& progress, std::vector<pollfd>& events,
                 bool is_spinning) const {
  for (int host = 0; host < hosts(); ++host) events[host] = progress[host].events();
  const int timeout = is_spinning ? 0 : kCheckInterval.count();
  if (poll(events.data(), events.size(), timeout) > 0) return true;
  // Another process may need the core, such as a rank of a host that shares it.
  if (is_spinning) sched_yield();
  return false;
}

std::string Links::Advance(std::vector<Progress>& progress,
                           const std::vector<pollfd>& events) const {
  for (int host = 0; host < hosts(); ++host) {
    if (events[host].revents && !progress[host].Receive()) return Ended(host, errno);
  }
  for (int host = 0; host < hosts(); ++host) {
    if (!events[host].revents && !progress[host].is_fed()) continue;
    if (!progress[host].Send()) return Ended(host, errno);
  }
  return "";
}

std::string Links::Failure(const std::vector<Progress>& progress,
                           const Segment& segment) const {
  const std::string reason = segment.Failure();
  if (!reason.empty()) return reason;
  const int silent = Silent(progress, kLostMilliseconds);
  return silent < hosts() ? Ended(silent, ETIMEDOUT) : "";
}

int Links::Silent(const std::vector<Progress>& progress, uint32_t milliseconds) const {
  const auto is_silent = [milliseconds](const Progress& each) {
    return each.IsSilent(milliseconds);
  };
  return std::find_if(progress.begin(), progress.end(), is_silent) - progress.begin();
}

void Links::Warn(const std::vector<Progress>& progress, const Segment& segment,
                 const std::string& operation, Stage stage) const {
  if (segment.rank() != 0) return;
  if (const int silent = Silent(progress, kDoubtMilliseconds); silent < hosts()) {
    const std::string rank = std::to_string(ranks_[silent]);
    segment.Warn(operation, ": nothing arrives from rank " + rank + Unreachable(silent));
    return;
  }
  const std::string missing = Missing(progress, segment.spread().largest, stage);
  if (missing.empty()) {
    // On each host that waits: which of them is the first is not known.
    segment.Warn(operation, ": " + Waiting(progress, segment.spread().largest, stage));
    return;
  }
  // One rank prints: the first of those that wait.
  const auto has_come = [](const Progress& each) { return each.has_come(); };
  if (std::any_of(progress.begin(), progress.begin() + host_, has_come)) return;
  segment.WarnOfMissing(operation, missing);
}

std::string Links::Late(const std::vector<Progress>& progress, const Segment& segment,
                        const std::string& operation, Stage stage) const {
  const std::string missing = Missing(progress, segment.spread().largest, stage);
  if (!missing.empty()) return hvdtrain::Late(operation, missing);
  const std::string limit = " within HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: ";
  return operation + " has made no progress" + limit +
         Waiting(progress, segment.spread().largest, stage);
}

bool Links::HasEnded(int host) const {
  char byte;
  const ssize_t bytes = recv(sockets_[host], &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return bytes == 0 || (bytes < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
}

std::string Links::Unreachable(int host) const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  char text[INET6_ADDRSTRLEN] = "";
  const std::string reason =
      " does not answer, since it is down or the network to it is cut";
  // The kernel may have closed the connection.
  if (getpeername(sockets_[host], reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return ": its host" + reason;
  }
  const void* const number =
      address.ss_family == AF_INET6
          ? static_cast<void*>(&reinterpret_cast<sockaddr_in6&>(address).sin6_addr)
          : &reinterpret_cast<sockaddr_in&>(address).sin_addr;
  inet_ntop(address.ss_family, number, text, sizeof(text));
  return std::string(": host ") + text + reason;
}

std::string Links::Ended(int host, int error) const {
  std::string ranks;
  int count = 0;
  for (int other = 0; other < hosts(); ++other) {
    if (sockets_[other] < 0 || (other != host && !HasEnded(other))) continue;
    ranks += (count++ ? ", " : "") + std::to_string(ranks_[other]);
  }
  if (count > 1) {
    return "the connections to ranks " + ranks +
           " have ended: one of them has left the job or has been lost, and the others "
           "have lost it";
  }
  if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH) {
    return "the connection to rank " + ranks + " has ended" + Unreachable(host);
  }
  const std::string cause =
      error ? " (" + std::system_category().message(error) + ")" : "";
  return "the connection to rank " + ranks + " has ended" + cause +
         ": this rank has left the job, has been lost, or has lost another rank, which "
         "its error names";
}

template <typename Condition>
std::string Links::Ranks(const std::vector<Progress>& progress,
                         Condition is_one) const {
  std::string ranks;
  for (int host = 0; host < hosts(); ++host) {
    if (host == host_ || !is_one(progress[host])) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(ranks_[host]);
  }
  return ranks;
}

std::string Links::Missing(const std::vector<Progress>& progress, int ranks_per_host,
                           Stage stage) const {
  if (stage != Stage::kCalls) return "";
  const std::string ranks =
      Ranks(progress, [](const Progress& each) { return !each.has_received(); });
  // The rank at the other end may itself wait for another rank of its host.
  const bool is_alone = ranks.empty() || ranks_per_host == 1;
  return is_alone ? ranks : ranks + ", or others of the same hosts";
}

std::string Links::Waiting(const std::vector<Progress>& progress, int ranks_per_host,
                           Stage stage) const {
  const std::string silent =
      Ranks(progress, [](const Progress& each) { return !each.has_received(); });
  const std::string full =
      Ranks(progress, [](const Progress& each) { return each.may_send(); });
  std::string text;
  if (!silent.empty()) text = "nothing has arrived from rank " + silent;
  if (!silent.empty() && stage == Relayed(stage)) {
    text += ", which may itself wait for another rank";
  }
  if (!full.empty()) {
    text += (text.empty() ? "" : ", and ");
    text += "what was sent to rank " + full + " has not been read";
  }
  if (ranks_per_host > 1) text += "; they may wait for other ranks of their hosts";
  return text;
}

}  // namespace hvdtrain
