// SHA-256 (FIPS 180-4).
#ifndef JAX_SPARSE_MLA_SHA256_H_
#define JAX_SPARSE_MLA_SHA256_H_

#include <array>
#include <cstdint>
#include <string_view>

namespace jax_sparse_mla {

using Sha256Digest = std::array<uint8_t, 32>;

Sha256Digest Sha256(std::string_view bytes);

}  // namespace jax_sparse_mla

#endif  // JAX_SPARSE_MLA_SHA256_H_
