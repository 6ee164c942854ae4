// Encryption of TCP connections: TLS 1.3 by OpenSSL, between a socket and its stream link.
//
// The two ends authenticate each other by one of:
//     key            a pre-shared key (RFC 8446, external PSK) with ephemeral Diffie-Hellman: a recorded connection
//                    stays secret even if the key becomes known later
//     certificates   of one authority. The certificate has the worker's name as its common name or as a DNS name,
//                    which the engine compares with the name in the handshake of workers
// An acceptor answers an initiator that fails with one alert, whatever the reason is.
#pragma once

#include <memory>

#include "core/link_security.h"
#include "transports/stream/byte_stream.h"

namespace telegrad {

/// Encrypts a socket. The handshake takes place with the first writes and reads; the initiator's first write begins it.
std::unique_ptr<ByteStream> make_tls_stream(UniqueFd socket, const LinkSecurityPtr& security, bool initiator);

}  // namespace telegrad
