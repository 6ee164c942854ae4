// Listeners in a process that has no descriptors left.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "core/engine_parts.h"
#include "tests/links.h"

namespace telegrad::test {
namespace {

void limit_descriptors(rlim_t most) {
  rlimit limit;
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = std::min(most, limit.rlim_max);
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

/// Takes all descriptors below the limit.
std::vector<UniqueFd> take_descriptors() {
  std::vector<UniqueFd> taken;
  while (true) {
    UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!fd) return taken;
    taken.push_back(std::move(fd));
  }
}

UniqueFd new_socket() { return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

void connect(const UniqueFd& socket, const std::string& address) {
  const std::string name = address.substr(address.find('@') + 1);
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  CHECK_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), size), 0);
}

bool has_ended(const UniqueFd& socket) {
  char byte;
  return ::recv(socket.get(), &byte, 1, MSG_DONTWAIT) == 0;
}

CASE(a_listener_gets_its_spare_descriptor_back) {
  rlimit before;
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto listener = listen_on(fresh_address("unix"));
  CHECK(!listener->accept() && !listener->is_stuck());  // UBSan needs descriptors for its first check of a type
  const UniqueFd first = new_socket(), second = new_socket(), third = new_socket();
  limit_descriptors(64);
  std::vector<UniqueFd> taken = take_descriptors();
  connect(first, listener->address());
  CHECK(!listener->accept());
  CHECK(!listener->is_stuck());
  CHECK(has_ended(first));
  limit_descriptors(0);
  connect(second, listener->address());
  for (int i = 0; i < 2; ++i) {
    CHECK(!listener->accept());
    CHECK(listener->is_stuck());
  }
  limit_descriptors(64);
  taken.clear();
  const auto link = listener->accept();
  CHECK(link != nullptr);
  CHECK(!listener->is_stuck());
  taken = take_descriptors();
  connect(third, listener->address());
  CHECK(!listener->accept());
  CHECK(!listener->is_stuck());
  CHECK(has_ended(third));
  limit_descriptors(before.rlim_cur);
}

CASE(a_listener_without_descriptors_does_not_make_the_leader_spin) {
  rlimit before;
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  EngineParts parts{Settings{}};
  parts.timer.start(parts.mutex, [&](Lock& lock) NO_THREAD_SAFETY_ANALYSIS {
    parts.timer.clear();
    parts.peers.on_timer(lock, now());
  });
  const std::string address = parts.peers.listen(fresh_address("unix"));
  const UniqueFd first = new_socket(), second = new_socket();
  const auto wait = [&](const std::function<bool()>& done, Nanos time) {
    Waiter w;
    return parts.leader.wait_for_progress(w, done, now() + time, {});
  };
  const auto accepted = [&](std::size_t count) {
    return [&parts, count]() NO_THREAD_SAFETY_ANALYSIS { return parts.peers.connections().size() == count; };
  };
  connect(first, address);
  CHECK(wait(accepted(1), 10 * kSecond) == WaitEnd::kDone);
  const std::uint64_t before_reads = parts.leader.reads();
  limit_descriptors(0);
  connect(second, address);
  CHECK(wait([] { return false; }, 200 * kMillisecond) == WaitEnd::kDeadline);
  CHECK(parts.leader.reads() - before_reads < 5000);  // without the pause, a busy machine has over 13,000
  limit_descriptors(before.rlim_cur);
  CHECK(wait(accepted(2), 10 * kSecond) == WaitEnd::kDone);
  parts.timer.stop(parts.mutex);
}

}  // namespace
}  // namespace telegrad::test
