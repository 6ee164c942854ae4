// Two ends of a connection that breaks, with links that outlive it.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "tests/links.h"
#include "transports/tcp/laned_link.h"
#include "transports/tcp/resumable_link.h"

namespace telegrad::test {

inline constexpr SocketKind kTestSocket{.peer_credentials = remote_credentials};

/// A socket that breaks after some more bytes of both ends together. A slow one takes a few bytes, or none.
class CutStream final : public ByteStream {
 public:
  CutStream(UniqueFd socket, std::int64_t& left, bool slow) : ByteStream(std::move(socket)), left_(left), slow_(slow) {}
  ssize_t write(const iovec* parts, int count) override {
    if (slow_ && (takes_ = !takes_)) {
      errno = EAGAIN;
      return -1;
    }
    if (left_ <= 0) {
      ::shutdown(fd(), SHUT_RDWR);
      errno = EPIPE;
      return -1;
    }
    std::vector<iovec> some;
    std::int64_t most = slow_ ? std::min<std::int64_t>(left_, 90) : left_;
    for (int i = 0; i < count && most > 0; ++i) {
      some.push_back({parts[i].iov_base, std::min<std::size_t>(parts[i].iov_len, static_cast<std::size_t>(most))});
      most -= static_cast<std::int64_t>(some.back().iov_len);
    }
    const ssize_t n = ByteStream::write(some.data(), static_cast<int>(some.size()));
    if (n > 0) left_ -= n;
    return n;
  }

 private:
  std::int64_t& left_;
  const bool slow_;
  bool takes_ = false;
};

inline constexpr std::int64_t kWhole = INT64_MAX;

/// A link, what it has to send, and what has arrived.
struct End {
  std::unique_ptr<ResumableLink> link;
  std::vector<Message> to_send;
  std::vector<std::unique_ptr<Outgoing>> sending;
  std::size_t sent = 0;
  std::vector<bool> overtook;  // messages that were sent before an earlier large one
  std::size_t between = 0;     // the one that is being sent; 0: none
  RecordingInbox inbox;
  bool broken = false;

  void add(Message m) { to_send.push_back(std::move(m)); }
  /// Sends what is possible, and reads.
  bool step() {
    bool moved = false;
    while (sending.size() < to_send.size())
      sending.push_back(std::make_unique<Outgoing>(to_send[sending.size()].outgoing()));
    link->flush();
    overtook.resize(to_send.size());
    while (sent < to_send.size()) {
      if (overtook[sent]) {
        ++sent;
        continue;
      }
      const bool overtakes = between != 0;
      const SendState state = overtakes ? send_between() : link->send(*sending[sent]);
      if (state == SendState::kBroken) fail(__FILE__, __LINE__, "a suspended link blocks: " + link->error().text);
      if (state == SendState::kBlocked && (overtakes || !link->is_large(*sending[sent]) || !send_others())) break;
      if (state == SendState::kSent && !overtakes) ++sent;
      moved = true;
    }
    const std::size_t before = inbox.messages.size();
    const ReceiveState state = link->receive(inbox, kAnyBudget);
    if (state == ReceiveState::kToSend) link->flush();
    broken = broken || state == ReceiveState::kBroken;
    return moved || inbox.messages.size() > before || state == ReceiveState::kToSend;
  }
  /// Sends the small messages behind a large one that is blocked. Returns whether any was sent.
  bool send_others() {
    bool any = false;
    for (std::size_t n = sent + 1; n < to_send.size() && !between; ++n) {
      if (overtook[n] || link->is_large(*sending[n])) continue;
      between = n;
      any = send_between() == SendState::kSent || any;
    }
    return any;
  }
  SendState send_between() {
    const SendState state = link->send_between(*sending[between]);
    if (state == SendState::kSent) overtook[std::exchange(between, 0)] = true;
    return state;
  }
};

/// Two ends, and the connection between them.
struct Pair {
  explicit Pair(std::int64_t cut = kWhole, bool fragments = false) : striping{}, slow(fragments) {
    if (fragments) striping.sizes = {.message = 400, .segment = 100, .fragment = 150};
    auto links = connect(cut);
    for (int i = 0; i < 2; ++i) {
      ends[i].link = std::move(links[i]);
      ends[i].link->keep();
    }
  }
  std::array<std::unique_ptr<ResumableLink>, 2> connect(std::int64_t cut) {
    budgets.push_back(std::make_unique<std::int64_t>(cut));
    int fds[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    std::array<std::unique_ptr<ResumableLink>, 2> links;
    for (int i = 0; i < 2; ++i) {
      auto stream = std::make_unique<CutStream>(UniqueFd(fds[i]), *budgets.back(), slow);
      links[i] = std::make_unique<ResumableLink>(
          std::make_unique<LanedLink>(std::move(stream), "test", false, kTestSocket, striping));
    }
    return links;
  }
  /// Continues on another connection; what is in the handshake may be lost, as when its last frame is.
  void resume(std::int64_t cut) {
    auto links = connect(cut);
    for (const End& e : ends) CHECK(e.link->may_resume());
    const std::uint64_t a = ends[0].link->suspend(), b = ends[1].link->suspend();
    CHECK(ends[0].link->resume(*links[0], b));
    CHECK(ends[1].link->resume(*links[1], a));
    for (End& e : ends) e.broken = false;
    for (auto& l : links) spent.push_back(std::move(l));
  }
  bool is_done() const {
    return ends[0].inbox.messages.size() == ends[1].to_send.size() &&
           ends[1].inbox.messages.size() == ends[0].to_send.size();
  }
  /// Exchanges messages until all have arrived or the connection has broken.
  void run() {
    for (int idle = 0; !is_done() && !ends[0].broken && !ends[1].broken; ++idle) {
      CHECK(idle < 10'000);  // nothing moves
      for (End& e : ends) {
        if (e.step()) idle = 0;
      }
    }
  }
  void check() const {
    for (int i = 0; i < 2; ++i) {
      const auto& got = ends[1 - i].inbox.messages;
      CHECK_EQ(got.size(), ends[i].to_send.size());
      for (std::size_t n = 0; n < got.size(); ++n) check_same(ends[i].to_send[n], got[n]);
    }
  }
  /// Checks messages of which some have overtaken others.
  void check_each_once() {
    for (int i = 0; i < 2; ++i) {
      auto& got = ends[1 - i].inbox.messages;
      const auto id = [](const Incoming& m) { return m.header.call_id; };
      std::ranges::sort(got, {}, id);
    }
    check();
  }
  Striping striping;
  const bool slow;
  std::array<End, 2> ends;
  std::vector<std::unique_ptr<ResumableLink>> spent;
  std::vector<std::unique_ptr<std::int64_t>> budgets;
};

}  // namespace telegrad::test
