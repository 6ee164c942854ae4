// Unix sockets: addresses, and the credentials of the other end.
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

/// Returns the part of an address after the scheme.
std::string after_scheme(const std::string& address);

/// Makes a non-blocking socket of a family and type, for this address. Throws std::system_error.
Descriptor make_socket(int family, int type, const std::string& address);

/// Returns the kernel's name of an address "scheme:@name" (abstract: no file, ends with the process) or "scheme:/path".
/// Throws std::system_error.
std::pair<sockaddr_un, socklen_t> unix_name(const std::string& address);

/// Make a Unix socket of `type` that listens at an address, or is connected to it. Throw std::system_error.
Descriptor listen_unix(int type, const std::string& address);
Descriptor connect_unix(int type, const std::string& address);

/// Returns the user at the other end, as the kernel reports it.
PeerUser unix_peer(int fd);

}  // namespace telegrad
