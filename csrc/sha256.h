// SHA-256 (FIPS 180-4).
#ifndef JAX_SPARSE_MLA_SHA256_H_
#define JAX_SPARSE_MLA_SHA256_H_

#include <string>
#include <string_view>

namespace jax_sparse_mla {

// The digest's 32 bytes.
std::string Sha256(std::string_view bytes);

}  // namespace jax_sparse_mla

#endif  // JAX_SPARSE_MLA_SHA256_H_
