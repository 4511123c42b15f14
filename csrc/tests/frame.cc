#include "frame.h"

#include <atomic>
#include <new>

#include "sha256.h"

namespace jax_sparse_mla {
namespace {

std::atomic<int64_t> live_errors{0};

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  auto* error = new XLA_FFI_Error{args->errc, args->message};
  ++live_errors;
  return error;
}

// The function that gives an error's message got another name with API 0.5 (jaxlib 0.12).
#if XLA_FFI_API_MINOR < 5
#define GET_MESSAGE XLA_FFI_Error_GetMessage
using GetMessageArgs = XLA_FFI_Error_GetMessage_Args;
#else
#define GET_MESSAGE XLA_FFI_Error_GetDetails
using GetMessageArgs = XLA_FFI_Error_GetDetails_Args;
#endif

void GetErrorMessage(GetMessageArgs* args) { args->message = args->error->message.c_str(); }

void DestroyError(XLA_FFI_Error_Destroy_Args* args) {
  --live_errors;
  delete args->error;
}

XLA_FFI_Error* MakeApiError(const char* message) {
  auto* error = new XLA_FFI_Error{XLA_FFI_Error_Code_UNIMPLEMENTED, message};
  ++live_errors;
  return error;
}

template <typename Args>
const Context& ContextOf(const Args* args) {
  return *reinterpret_cast<const Context*>(args->ctx);
}

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  if (ContextOf(args).fails) return MakeApiError("GPU context is not available");
  args->stream = ContextOf(args).stream;
  return nullptr;
}

XLA_FFI_Error* GetDeviceOrdinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  if (ContextOf(args).fails) return MakeApiError("no device ordinal");
  args->device_ordinal = ContextOf(args).device;
  return nullptr;
}

// XLA sorts attributes by name, as the map does.
struct FrameAttributes {
  explicit FrameAttributes(const std::map<std::string, Attribute>& attributes) {
    for (const auto& [name, value] : attributes) {
      spans.push_back(
          std::make_unique<XLA_FFI_ByteSpan>(XLA_FFI_ByteSpan{name.data(), name.size()}));
      names.push_back(spans.back().get());
      if (const auto* text = std::get_if<std::string>(&value)) {
        spans.push_back(
            std::make_unique<XLA_FFI_ByteSpan>(XLA_FFI_ByteSpan{text->data(), text->size()}));
        Add(XLA_FFI_AttrType_STRING, spans.back().get());
      } else if (const auto* number = std::get_if<int32_t>(&value)) {
        AddScalar(XLA_FFI_DataType_S32, number);
      } else if (const auto* wide = std::get_if<int64_t>(&value)) {
        AddScalar(XLA_FFI_DataType_S64, wide);
      } else {
        AddScalar(XLA_FFI_DataType_F32, &std::get<float>(value));
      }
    }
  }

  void Add(XLA_FFI_AttrType type, void* value) {
    types.push_back(type);
    values.push_back(value);
  }
  void AddScalar(XLA_FFI_DataType dtype, const void* value) {
    scalars.push_back(
        std::make_unique<XLA_FFI_Scalar>(XLA_FFI_Scalar{dtype, const_cast<void*>(value)}));
    Add(XLA_FFI_AttrType_SCALAR, scalars.back().get());
  }

  std::vector<std::unique_ptr<XLA_FFI_ByteSpan>> spans;
  std::vector<std::unique_ptr<XLA_FFI_Scalar>> scalars;
  std::vector<XLA_FFI_AttrType> types;
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<void*> values;
};

std::vector<XLA_FFI_Buffer> FrameBuffers(std::vector<Buffer>& buffers) {
  std::vector<XLA_FFI_Buffer> frame;
  for (Buffer& buffer : buffers) {
    frame.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, buffer.dtype, buffer.data,
                     static_cast<int64_t>(buffer.dims.size()), buffer.dims.data()});
  }
  return frame;
}

template <typename T>
std::vector<void*> Pointers(std::vector<T>& values) {
  std::vector<void*> pointers;
  for (T& value : values) pointers.push_back(&value);
  return pointers;
}

}  // namespace

const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api made{};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                        XLA_FFI_API_MINOR};
    made.XLA_FFI_Error_Create = CreateError;
    made.GET_MESSAGE = GetErrorMessage;
    made.XLA_FFI_Error_Destroy = DestroyError;
    made.XLA_FFI_Stream_Get = GetStream;
    made.XLA_FFI_DeviceOrdinal_Get = GetDeviceOrdinal;
    return made;
  }();
  return &api;
}

int64_t LiveErrors() { return live_errors; }

Outcome Call::Run(const Handler& handler, XLA_FFI_ExecutionStage stage) {
  FrameAttributes frame_attributes(attributes);
  std::vector<XLA_FFI_Buffer> frame_arguments = FrameBuffers(arguments);
  std::vector<XLA_FFI_Buffer> frame_results = FrameBuffers(results);
  std::vector<void*> argument_pointers = Pointers(frame_arguments);
  std::vector<void*> result_pointers = Pointers(frame_results);
  std::vector<XLA_FFI_ArgType> argument_types(arguments.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(results.size(), XLA_FFI_RetType_BUFFER);

  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = reinterpret_cast<decltype(frame.ctx)>(&context);
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(arguments.size()),
                argument_types.data(), argument_pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results.size()),
                result_types.data(), result_pointers.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 static_cast<int64_t>(attributes.size()),
                 frame_attributes.types.data(),
                 frame_attributes.names.data(),
                 frame_attributes.values.data()};
  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) return std::nullopt;
  Outcome outcome(std::in_place, error->code, error->message);
  XLA_FFI_Error_Destroy_Args destroy{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  DestroyError(&destroy);
  return outcome;
}

std::string Hash(const std::string& code) { return Sha256(code); }

Call MakeCall(const std::string& code, const Shape& shape) {
  // A gigabyte apart, from an address that no allocation has.
  auto address = [](int i) {
    return reinterpret_cast<void*>(uintptr_t{0x100000000000} + (uintptr_t(i) << 30));
  };
  const int64_t rows = shape.queries * shape.num_splits;
  Call call;
  call.arguments = {
      {XLA_FFI_DataType_BF16, {shape.queries, shape.heads, shape.q_latent_dim}, address(0)},
      {XLA_FFI_DataType_BF16, {shape.queries, shape.heads, shape.q_rope_dim}, address(1)},
      {XLA_FFI_DataType_U8, {shape.records, 656}, address(2)},
      {XLA_FFI_DataType_S32, {shape.indices}, address(3)},
      {XLA_FFI_DataType_S32, {rows}, address(4)},
      {XLA_FFI_DataType_S32, {rows}, address(5)},
  };
  call.results = {
      {shape.partial ? XLA_FFI_DataType_F32 : XLA_FFI_DataType_BF16,
       {rows, shape.heads, 512},
       address(6)},
      {XLA_FFI_DataType_F32, {rows, shape.heads}, address(7)},
  };
  call.attributes = {
      {"code", code},
      {"code_hash", Hash(code)},
      {"symbol", shape.partial ? "sparse_mla_partial" : "sparse_mla_whole"},
      {"arch", "gfx950"},
      {"block_size", int32_t{256}},
      {"lds_bytes", int32_t{65536}},
      {"softmax_scale", 0.125f},
      {"num_splits", shape.num_splits},
      {"flags", int32_t{1}},
  };
  return call;
}

}  // namespace jax_sparse_mla
