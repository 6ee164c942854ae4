#include "transports/tcp/congestion.h"

// Not <netinet/tcp.h>: its tcp_info is older and lacks the last fields.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <string>

#include "base/unique_fd.h"

namespace telegrad {
namespace {

constexpr std::size_t kLongestName = 16;
constexpr std::string_view kUnpaced[] = {"cubic", "reno"};  // any process may select the latter

std::string in_use(int socket) {
  char name[kLongestName] = {};
  socklen_t size = sizeof name;
  if (getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size) != 0) return {};
  return std::string(name, strnlen(name, size));
}

bool use(int socket, std::string_view name) {
  return setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

/// Returns the system's default, in this network namespace.
std::string of_the_system() {
  const UniqueFd fresh(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return fresh ? in_use(fresh.get()) : std::string();
}

}  // namespace

bool paces(std::string_view name) { return name.starts_with("bbr"); }

void disable_pacing(int socket) {
  if (!paces(in_use(socket))) return;
  for (const std::string_view name : kUnpaced) {
    if (use(socket, name)) return;
  }
}

void select_congestion_control(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) == 0)
    select_congestion_control(socket, info.tcpi_min_rtt);
}

void select_congestion_control(int socket, std::uint32_t round_trip) {
  if (round_trip <= kMaxUnpacedRoundTrip) return;
  const std::string wanted = of_the_system();
  if (paces(wanted) && wanted != in_use(socket)) use(socket, wanted);
}

}  // namespace telegrad
