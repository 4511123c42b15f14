// Right calls reach HIP with the right launch; wrong ones are errors that name the fault.

#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "driver.h"

namespace jax_sparse_mla {
namespace {

// Keeps what reached the kernel.
struct Launches {
  struct Entry {
    std::string symbol;
    std::string arguments;
    void* stream;
    int device;
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t dynamic_lds_bytes;
  };

  Launches() { SimulatedHip::Get().set_launcher(&Launches::Keep, this); }
  ~Launches() { SimulatedHip::Get().set_launcher(nullptr, nullptr); }

  static int Keep(const SimhipLaunch* launch, char*, size_t, void* user) {
    auto* self = static_cast<Launches*>(user);
    Entry entry{launch->symbol,
                std::string(static_cast<const char*>(launch->arguments), launch->arguments_size),
                launch->stream,
                launch->device,
                {},
                {},
                launch->dynamic_lds_bytes};
    std::memcpy(entry.grid, launch->grid, sizeof entry.grid);
    std::memcpy(entry.block, launch->block, sizeof entry.block);
    std::lock_guard<std::mutex> lock(self->mutex);
    self->entries.push_back(entry);
    return 0;
  }

  std::mutex mutex;
  std::vector<Entry> entries;
};

// The kernel argument segment at the byte offsets that contract.py's order and types give.
template <typename T>
T At(const std::string& arguments, size_t offset) {
  T value;
  std::memcpy(&value, arguments.data() + offset, sizeof value);
  return value;
}

void ExpectLaunch(const Launches::Entry& entry, const Call& call, const Shape& shape,
                  uint32_t workgroups) {
  EXPECT(entry.symbol == (shape.partial ? "sparse_mla_partial" : "sparse_mla_whole"));
  EXPECT(entry.grid[0] == workgroups && entry.grid[1] == 1 && entry.grid[2] == 1);
  EXPECT(entry.block[0] == 256 && entry.block[1] == 1 && entry.block[2] == 1);
  EXPECT(entry.dynamic_lds_bytes == 0);
  EXPECT(entry.arguments.size() == 108);
  const std::string& a = entry.arguments;
  EXPECT(At<char*>(a, 0) == call.arguments[kQLatent].data);
  const auto rope = static_cast<char*>(call.arguments[kQRope].data);
  EXPECT(At<char*>(a, 8) == rope + 2 * (shape.q_rope_dim - 64));
  EXPECT(At<char*>(a, 16) == call.arguments[kKv].data);
  EXPECT(At<char*>(a, 24) == call.arguments[kIndices].data);
  EXPECT(At<char*>(a, 32) == call.arguments[kRowBegin].data);
  EXPECT(At<char*>(a, 40) == call.arguments[kRowEnd].data);
  EXPECT(At<char*>(a, 48) == call.results[kOut].data);
  EXPECT(At<char*>(a, 56) == call.results[kLse].data);
  EXPECT(At<int32_t>(a, 64) == shape.heads * shape.q_latent_dim);
  EXPECT(At<int32_t>(a, 68) == shape.q_latent_dim);
  EXPECT(At<int32_t>(a, 72) == shape.heads * shape.q_rope_dim);
  EXPECT(At<int32_t>(a, 76) == shape.q_rope_dim);
  EXPECT(std::fabs(At<float>(a, 80) - 0.125 * std::log2(std::exp(1.0))) < 1e-8);
  EXPECT(At<int32_t>(a, 84) == shape.queries * shape.num_splits);
  EXPECT(At<int32_t>(a, 88) == shape.heads);
  EXPECT(At<int32_t>(a, 92) == shape.num_splits);
  EXPECT(At<int32_t>(a, 96) == shape.records);
  EXPECT(At<int32_t>(a, 100) == shape.indices);
  EXPECT(At<int32_t>(a, 104) == 1);
}

Shape WithShape(int64_t queries, int64_t heads, int64_t latent, int64_t rope, int32_t splits,
                bool partial) {
  Shape shape;
  shape.queries = queries;
  shape.heads = heads;
  shape.q_latent_dim = latent;
  shape.q_rope_dim = rope;
  shape.num_splits = splits;
  shape.partial = partial;
  return shape;
}

SHIM_TEST(LaunchesWhatTheCallSays) {
  const struct {
    Shape shape;
    uint32_t workgroups;  // contract.py: one a row up to 16 heads, else rows in eights times groups
  } cases[] = {
      {WithShape(3, 16, 512, 64, 1, false), 3},
      {WithShape(3, 1, 512, 64, 1, false), 3},
      {WithShape(3, 16, 576, 576, 1, false), 3},
      {WithShape(5, 8, 512, 576, 1, true), 5},
      {WithShape(5, 8, 576, 64, 1, false), 5},
      {WithShape(1, 16, 512, 64, 16, true), 16},
      {WithShape(3, 17, 512, 64, 1, false), 16},
      {WithShape(8, 32, 576, 576, 1, false), 16},
      {WithShape(9, 128, 576, 576, 1, false), 128},
      {WithShape(2, 128, 512, 64, 4, true), 64},
      {WithShape(29128, 128, 576, 576, 1, false), 233024},
  };
  const std::string code = NewCode();
  for (int device : {0, 3}) {
    Stream stream(device);
    for (const auto& [shape, workgroups] : cases) {
      Launches launches;
      Call call = MakeCall(code, shape);
      call.context = {device, stream.get(), false};
      EXPECT_OK(Initialize(call));
      EXPECT_OK(Execute(call));
      EXPECT(launches.entries.size() == 1);
      if (launches.entries.size() != 1) continue;
      ExpectLaunch(launches.entries[0], call, shape, workgroups);
      EXPECT(launches.entries[0].stream == stream.get());
      EXPECT(launches.entries[0].device == device);

      EXPECT_OK(ExecuteHost(call));
      EXPECT(launches.entries.size() == 2);
      if (launches.entries.size() != 2) continue;
      ExpectLaunch(launches.entries[1], call, shape, workgroups);
      EXPECT(launches.entries[1].stream == nullptr);
      EXPECT(launches.entries[1].device == device);
    }
  }
}

SHIM_TEST(OneByteTypesOfTheCacheAreAlike) {
  Launches launches;
  const std::string code = NewCode();
  for (XLA_FFI_DataType dtype :
       {XLA_FFI_DataType_U8, XLA_FFI_DataType_S8, XLA_FFI_DataType_F8E4M3FN}) {
    Call call = MakeCall(code);
    call.arguments[kKv].dtype = dtype;
    EXPECT_OK(ExecuteHost(call));
  }
  EXPECT(launches.entries.size() == 3);
}

SHIM_TEST(NothingToComputeLaunchesNothing) {
  const std::string code = NewCode();
  SimulatedHip::Get().clear_calls();
  for (Shape shape : {WithShape(0, 16, 512, 64, 1, false), WithShape(0, 128, 576, 576, 4, true),
                      WithShape(3, 0, 512, 64, 1, false)}) {
    Call call = MakeCall(code, shape);
    for (Buffer& buffer : call.arguments) buffer.data = nullptr;
    for (Buffer& buffer : call.results) buffer.data = nullptr;
    if (shape.heads == 0) {
      call.arguments[kKv] = MakeCall(code).arguments[kKv];
      call.arguments[kIndices] = MakeCall(code).arguments[kIndices];
      call.arguments[kRowBegin] = MakeCall(code).arguments[kRowBegin];
      call.arguments[kRowEnd] = MakeCall(code).arguments[kRowEnd];
    } else {
      call.arguments[kKv].dims[0] = 0;
      call.arguments[kIndices].dims[0] = 0;
    }
    EXPECT_OK(Execute(call));
    EXPECT_OK(ExecuteHost(call));
  }
  EXPECT(SimulatedHip::Get().call_count() == 0);
}

SHIM_TEST(EmptyCacheAndEmptyIndicesLaunch) {
  Launches launches;
  Shape shape;
  shape.records = shape.indices = 0;
  Call call = MakeCall(NewCode(), shape);
  call.arguments[kKv].data = call.arguments[kIndices].data = nullptr;
  EXPECT_OK(ExecuteHost(call));
  EXPECT(launches.entries.size() == 1);
}

SHIM_TEST(LargestSizesFit) {
  Launches launches;
  Shape shape;
  shape.records = shape.indices = std::numeric_limits<int32_t>::max();
  shape.queries = 16777215;  // times 256 work-items: 2^32 - 256
  Call call = MakeCall(NewCode(), shape);
  EXPECT_OK(ExecuteHost(call));
  EXPECT(launches.entries.size() == 1 && launches.entries[0].grid[0] == 16777215);
}

SHIM_TEST(MalformedCallsNameTheFault) {
  struct Case {
    const char* message;
    void (*spoil)(Call&);
  };
  const Case cases[] = {
      // Ranks, shapes.
      {"'q_latent' must have shape [any, any, 512]",
       [](Call& c) { c.arguments[kQLatent].dims = {3, 16}; }},
      {"'q_latent' must have shape", [](Call& c) { c.arguments[kQLatent].dims = {3, 16, 512, 1}; }},
      {"got [3, 16, 511]", [](Call& c) { c.arguments[kQLatent].dims[2] = 511; }},
      {"'q_latent' must have shape", [](Call& c) { c.arguments[kQLatent].dims = {}; }},
      {"'q_latent' must have shape", [](Call& c) { c.arguments[kQLatent].dims[0] = -1; }},
      {"'q_rope' must have shape [3, 16, 64]", [](Call& c) { c.arguments[kQRope].dims[2] = 512; }},
      {"'q_rope' must have shape [3, 16, 64]", [](Call& c) { c.arguments[kQRope].dims[0] = 4; }},
      {"'q_rope' must have shape [3, 16, 576]",
       [](Call& c) { c.arguments[kQRope].dims = {3, 15, 576}; }},
      {"'kv' must have shape [any, 656]", [](Call& c) { c.arguments[kKv].dims[1] = 576; }},
      {"'kv' must have shape", [](Call& c) { c.arguments[kKv].dims = {10, 10, 656}; }},
      {"'kv' must have shape [any, 656], each size at most 2^31 - 1, got [2147483648, 656]",
       [](Call& c) { c.arguments[kKv].dims[0] = int64_t{1} << 31; }},
      {"'indices' must have shape [any]", [](Call& c) { c.arguments[kIndices].dims = {3, 40}; }},
      {"'indices' must have shape", [](Call& c) { c.arguments[kIndices].dims = {1LL << 31}; }},
      {"'row_begin' must have shape [3]", [](Call& c) { c.arguments[kRowBegin].dims = {4}; }},
      {"'row_end' must have shape [3]", [](Call& c) { c.arguments[kRowEnd].dims = {2}; }},
      {"'row_end' must have shape [3]", [](Call& c) { c.arguments[kRowEnd].dims = {3, 1}; }},
      {"'out' must have shape [3, 16, 512]", [](Call& c) { c.results[kOut].dims[2] = 576; }},
      {"'out' must have shape [3, 16, 512]", [](Call& c) { c.results[kOut].dims[0] = 2; }},
      {"'lse' must have shape [3, 16]", [](Call& c) { c.results[kLse].dims = {3, 16, 1}; }},
      {"'lse' must have shape [3, 16]", [](Call& c) { c.results[kLse].dims = {3, 12}; }},
      // Dtypes.
      {"'q_latent' must be BF16, got F16",
       [](Call& c) { c.arguments[kQLatent].dtype = XLA_FFI_DataType_F16; }},
      {"'q_rope' must be BF16, got F32",
       [](Call& c) { c.arguments[kQRope].dtype = XLA_FFI_DataType_F32; }},
      {"'kv' must be U8 or S8 or F8E4M3FN, got BF16",
       [](Call& c) { c.arguments[kKv].dtype = XLA_FFI_DataType_BF16; }},
      {"'kv' must be U8 or S8 or F8E4M3FN, got F8E5M2",
       [](Call& c) { c.arguments[kKv].dtype = XLA_FFI_DataType_F8E5M2; }},
      {"'indices' must be S32, got S64",
       [](Call& c) { c.arguments[kIndices].dtype = XLA_FFI_DataType_S64; }},
      {"'row_begin' must be S32, got U32",
       [](Call& c) { c.arguments[kRowBegin].dtype = XLA_FFI_DataType_U32; }},
      {"'row_end' must be S32, got S64",
       [](Call& c) { c.arguments[kRowEnd].dtype = XLA_FFI_DataType_S64; }},
      {"'out' must be BF16 for kernel 'sparse_mla_whole', got F32",
       [](Call& c) { c.results[kOut].dtype = XLA_FFI_DataType_F32; }},
      {"'out' must be BF16 for kernel 'sparse_mla_whole', got F16",
       [](Call& c) { c.results[kOut].dtype = XLA_FFI_DataType_F16; }},
      {"'out' must be F32 for kernel 'sparse_mla_partial', got BF16",
       [](Call& c) { c.attributes["symbol"] = std::string("sparse_mla_partial"); }},
      {"'symbol' must end in _whole or _partial, got 'sparse_mla'",
       [](Call& c) { c.attributes["symbol"] = std::string("sparse_mla"); }},
      {"'symbol' must end in _whole",
       [](Call& c) { c.attributes["symbol"] = std::string("whole"); }},
      {"'symbol' must end in _whole", [](Call& c) { c.attributes["symbol"] = std::string(); }},
      {"'lse' must be F32, got F64", [](Call& c) { c.results[kLse].dtype = XLA_FFI_DataType_F64; }},
      // Addresses.
      {"'q_latent' must be aligned to 16 bytes",
       [](Call& c) { c.arguments[kQLatent].data = static_cast<char*>(c.arguments[0].data) + 2; }},
      {"'kv' must be aligned to 16 bytes",
       [](Call& c) { c.arguments[kKv].data = static_cast<char*>(c.arguments[kKv].data) + 8; }},
      {"'lse' must be aligned to 16 bytes", [](Call& c) { c.results[kLse].data = nullptr; }},
      // Numbers of operands.
      {"Wrong number of arguments: expected 6 but got 5", [](Call& c) { c.arguments.pop_back(); }},
      {"Wrong number of arguments: expected 6 but got 7",
       [](Call& c) { c.arguments.push_back(c.arguments[0]); }},
      {"Wrong number of results: expected 2 but got 1", [](Call& c) { c.results.pop_back(); }},
      // Sizes that a launch cannot have.
      {"need 16777216 workgroups of 256 work-items",
       [](Call& c) {
         Shape shape;
         shape.queries = 16777216;
         c = MakeCall(std::get<std::string>(c.attributes["code"]), shape);
       }},
      {"need 16777216 workgroups of 256 work-items",
       [](Call& c) {
         Shape shape;
         shape.queries = 2097145;
         shape.heads = 128;
         c = MakeCall(std::get<std::string>(c.attributes["code"]), shape);
       }},
      {"'row_begin' must have shape [2147483648], each size at most 2^31 - 1, got [2147483648]",
       [](Call& c) {
         Shape shape;
         shape.queries = 1 << 30;
         shape.num_splits = 2;
         c = MakeCall(std::get<std::string>(c.attributes["code"]), shape);
       }},
      {"heads, got 3728271",
       [](Call& c) {
         Shape shape;
         shape.queries = 1;
         shape.heads = 3728271;  // times 576 is just above 2^31
         c = MakeCall(std::get<std::string>(c.attributes["code"]), shape);
       }},
      {"heads, got 2147483647",
       [](Call& c) {
         Shape shape;
         shape.queries = shape.heads = std::numeric_limits<int32_t>::max();
         c = MakeCall(std::get<std::string>(c.attributes["code"]), shape);
       }},
      // Scalar attributes.
      {"'num_splits' must be at least 1, got 0",
       [](Call& c) { c.attributes["num_splits"] = int32_t{0}; }},
      {"'num_splits' must be at least 1, got -2147483648",
       [](Call& c) { c.attributes["num_splits"] = std::numeric_limits<int32_t>::min(); }},
      {"'row_begin' must have shape [6]", [](Call& c) { c.attributes["num_splits"] = int32_t{2}; }},
      {"'block_size' must be a multiple of 64 up to 1024, got 0",
       [](Call& c) { c.attributes["block_size"] = int32_t{0}; }},
      {"'block_size' must be a multiple of 64 up to 1024, got 2048",
       [](Call& c) { c.attributes["block_size"] = int32_t{2048}; }},
      {"'block_size' must be a multiple of 64 up to 1024, got 100",
       [](Call& c) { c.attributes["block_size"] = int32_t{100}; }},
      {"'softmax_scale' must be finite",
       [](Call& c) { c.attributes["softmax_scale"] = std::numeric_limits<float>::infinity(); }},
      {"'softmax_scale' must be finite",
       [](Call& c) { c.attributes["softmax_scale"] = std::numeric_limits<float>::quiet_NaN(); }},
      {"'softmax_scale' must be finite, also times log2(e)",
       [](Call& c) { c.attributes["softmax_scale"] = std::numeric_limits<float>::max(); }},
      {"'flags' has bits that this build does not know: 6",
       [](Call& c) { c.attributes["flags"] = int32_t{6}; }},
      {"'flags' has bits", [](Call& c) { c.attributes["flags"] = int32_t{-1}; }},
      // The attribute dictionary.
      {"attribute 'code' is missing", [](Call& c) { c.attributes.erase("code"); }},
      {"attribute 'flags' is missing", [](Call& c) { c.attributes.erase("flags"); }},
      {"attribute 'num_splits': Wrong scalar data type: expected S32 but got S64",
       [](Call& c) { c.attributes["num_splits"] = int64_t{1}; }},
      {"attribute 'softmax_scale': Wrong",
       [](Call& c) { c.attributes["softmax_scale"] = int32_t{1}; }},
      {"attribute 'symbol': Wrong attribute type: expected string but got scalar",
       [](Call& c) { c.attributes["symbol"] = int32_t{1}; }},
      {"attribute 'block_size': Wrong attribute type: expected scalar but got string",
       [](Call& c) { c.attributes["block_size"] = std::string("256"); }},
      {"expected 9 attributes, got 10", [](Call& c) { c.attributes["spare"] = int32_t{1}; }},
  };
  const std::string code = NewCode();
  SimulatedHip::Get().clear_calls();
  for (const Case& entry : cases) {
    for (auto* execute : {&Execute, &ExecuteHost}) {
      Call call = MakeCall(code);
      entry.spoil(call);
      EXPECT_ERROR(execute(call), INVALID_ARGUMENT, entry.message);
    }
  }
  EXPECT(SimulatedHip::Get().call_count() == 0);
  Call call = MakeCall(code);
  EXPECT_OK(ExecuteHost(call));
}

SHIM_TEST(TheContextIsCheckedToo) {
  const std::string code = NewCode();
  Call call = MakeCall(code);
  call.context.fails = true;
  EXPECT_ERROR(Execute(call), INVALID_ARGUMENT, "Failed to get platform stream",
               "GPU context is not available");
  EXPECT_ERROR(Initialize(call), INVALID_ARGUMENT, "no device ordinal");
  call.context = {-1, nullptr, false};
  EXPECT_ERROR(Initialize(call), INTERNAL, "XLA gave device ordinal -1");
  EXPECT_ERROR(ExecuteHost(call), INTERNAL, "XLA gave device ordinal -1");
  call.context = {kNumDevices, nullptr, false};
  EXPECT_ERROR(Initialize(call), INTERNAL, "hipSetDevice failed", "hipErrorInvalidDevice (101)");
  call.context = {};
  EXPECT_ERROR(call.Run(Shim::Get().initialize, XLA_FFI_ExecutionStage_EXECUTE), INVALID_ARGUMENT,
               "Wrong execution stage");
  EXPECT_OK(Initialize(call));
}

SHIM_TEST(HandlersSayTheirVersionAndTraits) {
  const struct {
    XLA_FFI_Handler* handler;
    XLA_FFI_Handler_Traits traits;
  } handlers[] = {{Shim::Get().initialize, 0},
                  {Shim::Get().execute, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE},
                  {Shim::Get().execute_host, 0}};
  for (const auto& [handler, traits] : handlers) {
    XLA_FFI_Metadata metadata{};
    metadata.struct_size = sizeof metadata;
    XLA_FFI_Metadata_Extension extension{{sizeof extension, XLA_FFI_Extension_Metadata, nullptr},
                                         &metadata};
    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.extension_start = &extension.extension_base;
    frame.api = Api();
    EXPECT(handler(&frame) == nullptr);
    EXPECT(metadata.api_version.major_version == XLA_FFI_API_MAJOR);
    EXPECT(metadata.api_version.minor_version == XLA_FFI_API_MINOR);
    EXPECT(metadata.traits == traits);
  }
}

}  // namespace
}  // namespace jax_sparse_mla
