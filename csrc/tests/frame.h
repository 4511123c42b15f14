// XLA's side of a custom call, made by hand from its public C API: the call frame with operands and
// attributes, the context with device and stream, and the errors that come back.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "xla/ffi/api/c_api.h"

// What XLA hides behind this name.
struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

namespace jax_sparse_mla {

// What a call frame's context stands for.
struct Context {
  int32_t device = 0;
  void* stream = nullptr;
  bool fails = false;
};

// The result of a handler: nothing, or XLA's error code and message.
using Outcome = std::optional<std::pair<XLA_FFI_Error_Code, std::string>>;

struct Buffer {
  XLA_FFI_DataType dtype;
  std::vector<int64_t> dims;
  void* data;
};

using Attribute = std::variant<std::string, int32_t, float, int64_t>;

// One custom call as the lowering makes it; tests change what they want to be wrong.
struct Call {
  std::vector<Buffer> arguments;
  std::vector<Buffer> results;
  std::map<std::string, Attribute> attributes;
  Context context;

  using Handler = std::function<XLA_FFI_Error*(XLA_FFI_CallFrame*)>;
  Outcome Run(const Handler& handler, XLA_FFI_ExecutionStage stage);
};

enum Argument { kQLatent, kQRope, kKv, kIndices, kRowBegin, kRowEnd };
enum Result { kOut, kLse };

struct Shape {
  int64_t queries = 3;
  int64_t heads = 16;
  int64_t records = 100;
  int64_t indices = 40;
  int64_t q_latent_dim = 512;
  int64_t q_rope_dim = 64;
  int32_t num_splits = 1;
  bool partial = false;
};

// A right call of that shape with this code object. The operands' addresses are made up (aligned,
// and different): nothing reads them.
Call MakeCall(const std::string& code, const Shape& shape = {});

// The attribute code_hash of a code object.
std::string Hash(const std::string& code);

const XLA_FFI_Api* Api();

// Errors that were made and not yet destroyed.
int64_t LiveErrors();

}  // namespace jax_sparse_mla
