#include <string_view>

#include "transports/transports.h"

namespace telegrad {

Transport* find_transport(const std::string& address) {
  struct Row {
    std::string_view scheme;
    Transport* (*make)();
  };
  static constexpr Row kTransports[] = {
      {"shm", shm_transport}, {"unix", unix_transport},     {"tcp", tcp_transport},
      {"tls", tcp_transport}, {"inproc", inproc_transport},
  };
  const std::string_view scheme = std::string_view(address).substr(0, address.find(':'));
  for (const Row& row : kTransports) {
    if (row.scheme == scheme) return row.make();
  }
  return nullptr;
}

}  // namespace telegrad
