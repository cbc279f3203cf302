#include "links.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace hvdtrain {
namespace {

using Clock = std::chrono::steady_clock;

// As in a barrier: how often a rank that sleeps checks whether another one has failed.
constexpr int kCheckMilliseconds = 100;

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
        more_(std::move(transfer.more)) {}

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
    if (!in_.is_empty() || !more_) return true;
    in_.Add(std::exchange(more_, nullptr)());
    return in_.Move(receive);
  }

  pollfd events() const {
    const int wanted = (in_.is_empty() ? 0 : POLLIN) | (out_.is_empty() ? 0 : POLLOUT);
    return {is_complete() ? -1 : socket_, static_cast<short>(wanted), 0};
  }

 private:
  const int socket_;
  Queue out_, in_;
  std::function<Block()> more_;
};

Links::Links(int host, std::vector<int> sockets, std::vector<int> ranks)
    : host_(host), sockets_(std::move(sockets)), ranks_(std::move(ranks)) {}

Links::~Links() {
  for (int socket : sockets_) {
    if (socket >= 0) close(socket);
  }
}

void Links::Close() {
  // Not close(): a kernel of this process may wait for the socket, and a process that
  // was forked has it, too.
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
      if (!progress[host].Advance()) {
        return "rank " + std::to_string(ranks_[host]) + " has left the job or has ended" +
               (errno ? std::string(": ") + strerror(errno) : "");
      }
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

std::string Links::Missing(const std::vector<Progress>& progress,
                           int ranks_per_host) const {
  std::string ranks;
  for (int host = 0; host < hosts(); ++host) {
    if (host == host_ || progress[host].has_received()) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(ranks_[host]);
  }
  // The rank at the other end waits in a barrier of its host, if it is not the one.
  return ranks_per_host == 1 ? ranks : ranks + ", or others of the same hosts";
}

}  // namespace hvdtrain
