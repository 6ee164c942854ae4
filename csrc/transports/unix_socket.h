// Unix sockets: addresses, and who is at the other end.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <string>
#include <utility>

#include "core/transport.h"
#include "transports/descriptor.h"

namespace telegrad {

/// Throws std::system_error.
[[noreturn]] void raise(int error, const std::string& what);

/// What follows the scheme of an address.
std::string after_scheme(const std::string& address);

/// A non-blocking socket of a family and type, for this address. Throws std::system_error.
Descriptor make_socket(int family, int type, const std::string& address);

/// "scheme:@name" (abstract: goes with the process, leaves no file) or "scheme:/path" as the kernel has it. Throws
/// std::system_error.
std::pair<sockaddr_un, socklen_t> unix_name(const std::string& address);

/// A Unix socket of `type` that listens at an address, or is connected to it. Throw std::system_error.
Descriptor listen_unix(int type, const std::string& address);
Descriptor connect_unix(int type, const std::string& address);

/// The kernel vouches for it: the user that has made the other end.
PeerUser unix_peer(int fd);

}  // namespace telegrad
