// Non-blocking sockets, for all transports with sockets.
#pragma once

#include <string>

#include "base/unique_fd.h"

namespace telegrad {

inline constexpr int kListenBacklog = 1024;  // connections that wait for `accept`; all workers of a group may connect

/// Throws std::system_error.
[[noreturn]] void raise(int error, const std::string& what);

/// Returns the part of an address after the scheme.
std::string after_scheme(const std::string& address);

/// Makes a non-blocking socket of a family and type, for this address. Throws std::system_error.
UniqueFd make_socket(int family, int type, const std::string& address);

}  // namespace telegrad
