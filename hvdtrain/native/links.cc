#include "links.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <system_error>
#include <utility>

namespace hvdtrain {
namespace {

using Clock = std::chrono::steady_clock;

// As in a barrier: how often a rank that sleeps checks whether another one has failed.
constexpr int kCheckMilliseconds = 100;
// From when on a host that acknowledges nothing is lost. The kernel would wait for a
// quarter of an hour. TCP_USER_TIMEOUT ends connections to ranks that are only late,
// too: it counts the time in which a receiver's window is full.
constexpr uint32_t kSilenceMilliseconds = 25000;

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

  // Moves what the socket takes or has without blocking. Returns false when the
  // connection has ended, with errno 0 where the other rank has closed it.
  template <typename Call>
  bool Move(Call call) {
    while (!is_empty()) {
      iovec vector[kBlocks];
      const int count = Fill(vector);
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
  static constexpr int kBlocks = 2;

  int Fill(iovec* vector) const {
    int count = 0;
    for (size_t i = next_; i < blocks_.size() && count < kBlocks; ++i) {
      vector[count++] = {blocks_[i].data, blocks_[i].bytes};
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
        then_receive_(std::move(transfer.then_receive)) {}

  bool is_complete() const { return out_.is_empty() && in_.is_empty(); }
  bool has_received() const { return in_.moved() > 0 || in_.is_empty(); }

  // Returns false when the connection has ended.
  bool Advance() {
    const auto send = [this](const msghdr* message, int flags) {
      return sendmsg(socket_, message, flags);
    };
    const auto receive = [this](msghdr* message, int flags) {
      return recvmsg(socket_, message, flags);
    };
    if (!out_.Move(send) || !in_.Move(receive)) return false;
    if (!in_.is_empty() || !then_receive_) return true;
    in_.Add(std::exchange(then_receive_, nullptr)());
    return in_.Move(receive);
  }

  // Whether the other host has not acknowledged what was sent, or probes of a full
  // window, for long. Keepalive probes find one to which nothing is on the way.
  bool IsSilent() const {
    tcp_info info{};
    socklen_t size = sizeof(info);
    return !is_complete() &&
           getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
           (info.tcpi_unacked > 0 || info.tcpi_probes > 0) &&
           info.tcpi_last_ack_recv > kSilenceMilliseconds;
  }

  pollfd events() const {
    const int wanted = (in_.is_empty() ? 0 : POLLIN) | (out_.is_empty() ? 0 : POLLOUT);
    return {is_complete() ? -1 : socket_, static_cast<short>(wanted), 0};
  }

 private:
  const int socket_;
  Queue out_, in_;
  std::function<Block()> then_receive_;
};

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

void Links::Close() {
  // Not close(): a kernel of this process may wait for the socket.
  for (int socket : sockets_) {
    if (socket >= 0) shutdown(socket, SHUT_RDWR);
  }
}

std::string Links::Exchange(std::vector<Transfer> transfers, Segment& segment,
                            const std::string& operation) {
  std::vector<Progress> progress;
  for (int host = 0; host < hosts(); ++host) {
    progress.emplace_back(sockets_[host], std::move(transfers[host]));
  }
  const auto start = Clock::now();
  const Limits& limits = segment.limits();
  bool has_warned = limits.warning.count() == 0;
  while (true) {
    bool is_complete = true;
    for (int host = 0; host < hosts(); ++host) {
      if (host == host_ || progress[host].is_complete()) continue;
      if (!progress[host].Advance()) return Ended(host, errno);
      is_complete = is_complete && progress[host].is_complete();
    }
    if (is_complete) return "";
    const auto waited = Clock::now() - start;
    if (waited < limits.spin) continue;
    std::vector<pollfd> events;
    for (int host = 0; host < hosts(); ++host) {
      events.push_back(host == host_ ? pollfd{-1, 0, 0} : progress[host].events());
    }
    if (poll(events.data(), events.size(), kCheckMilliseconds) > 0) continue;
    const std::string reason = segment.Failure();
    if (!reason.empty()) return reason;
    for (int host = 0; host < hosts(); ++host) {
      if (host != host_ && progress[host].IsSilent()) return Ended(host, ETIMEDOUT);
    }
    if (!has_warned && waited > limits.warning) {
      has_warned = true;
      // One rank prints: the first of those that wait.
      const auto has_come = [](const Progress& each) { return each.has_received(); };
      const auto end = progress.begin() + host_;
      if (segment.rank() == 0 && std::none_of(progress.begin(), end, has_come)) {
        segment.Warn(operation, Missing(progress, segment.size()));
      }
    }
    if (limits.failure.count() && waited > limits.failure) {
      return Late(operation, Missing(progress, segment.size()));
    }
  }
}

std::string Links::Ended(int host, int error) const {
  const std::string cause =
      error ? " (" + std::system_category().message(error) + ")" : "";
  return "the connection to rank " + std::to_string(ranks_[host]) + " has ended" + cause +
         ": this rank has left the job, has been lost, or has lost another rank, which "
         "its error names";
}

std::string Links::Missing(const std::vector<Progress>& progress,
                           int ranks_per_host) const {
  std::string ranks;
  for (int host = 0; host < hosts(); ++host) {
    if (host == host_ || progress[host].has_received()) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(ranks_[host]);
  }
  // The rank at the other end may itself wait for another rank of its host.
  return ranks_per_host == 1 ? ranks : ranks + ", or others of the same hosts";
}

}  // namespace hvdtrain
