// Unix sockets: addresses, and the credentials of the other end.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <string>
#include <utility>

#include "base/peer_credentials.h"
#include "base/unique_fd.h"
#include "transports/stream/socket.h"

namespace telegrad {

/// Returns the kernel's name of an address "scheme:@name" (abstract: no file, ends with the process) or "scheme:/path".
/// Throws std::system_error.
std::pair<sockaddr_un, socklen_t> unix_name(const std::string& address);

/// Make a Unix socket of `type` that listens at an address, or is connected to it. Throw std::system_error.
UniqueFd listen_unix(int type, const std::string& address);
UniqueFd connect_unix(int type, const std::string& address);

/// Returns the user at the other end, as the kernel reports it.
PeerCredentials unix_credentials(int fd);

}  // namespace telegrad
