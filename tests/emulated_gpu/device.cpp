// A device "cuda" for builds of torch without CUDA: its memory is host memory, and its kernels are those of the CPU.
//
// torch chooses the kernel of an operation by the device of its tensors. This library registers one function for all
// operations on "cuda": it gives the CPU's kernel aliases of the tensors, which say that they are on the CPU, and
// returns the results as tensors on "cuda". Operations that return views, and those that allocate memory, have
// functions of their own, because their results share memory with their arguments, or have none to share.
//
// Refused, as on a GPU: tensors of two devices, tensors of the CPU with dimensions, generators of the CPU.
// Not emulated: kernels that run later than the call (but see `order.h`), a limit of memory, and a GPU's rounding.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <unordered_set>

#include "order.h"

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using OptionalDevice = std::optional<Device>;
using OptionalType = std::optional<c10::ScalarType>;

constexpr DeviceIndex kNumDevices = 2;
thread_local DeviceIndex current_index = 0;
// The current stream of each device in this thread. `streams.py` makes the streams; a default one has its device's index.
thread_local StreamId current_streams[kNumDevices] = {0, 1};
Order order;

StreamId stream_of(Device device) { return current_streams[device.index()]; }

DeviceIndex exchange(DeviceIndex index) {
  const auto before = current_index;
  if (index >= 0) current_index = index;
  return before;
}

Device current_device() { return Device(c10::kCUDA, current_index); }

Device with_index(OptionalDevice device) { return device && device->has_index() ? *device : current_device(); }

// ---- memory -------------------------------------------------------------------------------------------------------

void free_on_device(void* memory) {
  order.release(memory);
  c10::free_cpu(memory);
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* memory = c10::alloc_cpu(num_bytes);
    order.allocate(memory, stream_of(current_device()));
    return {memory, memory, &free_on_device, current_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};

DeviceMemory device_memory;

// Pinned memory is ordinary memory whose addresses are kept, so that `Tensor.is_pinned` knows it.
std::mutex pinned_mutex;
std::map<const char*, size_t> pinned_blocks;  // address -> number of bytes

void free_pinned(void* memory) {
  {
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks.erase(static_cast<const char*>(memory));
  }
  c10::free_cpu(memory);
}

bool is_pinned(const void* address) {
  const auto* byte = static_cast<const char*>(address);
  const std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto next = pinned_blocks.upper_bound(byte);
  if (next == pinned_blocks.begin()) return false;
  const auto& [start, num_bytes] = *std::prev(next);
  return byte < start + num_bytes;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* memory = c10::alloc_cpu(num_bytes);
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks[static_cast<const char*>(memory)] = num_bytes;
    return {memory, memory, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};

PinnedMemory pinned_memory;

// ---- random numbers -----------------------------------------------------------------------------------------------

// Whether generators of the device draw the numbers that a generator of the CPU with the same seed draws.
bool draws_as_cpu = false;

// Like a GPU's generator, this one has a state of 16 bytes, a seed and an offset, and every operation that draws moves
// the offset. The CPU's generator, seeded with both, draws the numbers, which therefore differ from those of a GPU.
// With `draws_as_cpu`, it is only seeded where the program seeds it, and its state is the state.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index)
      : GeneratorImpl(Device(c10::kCUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        drawing_(at::detail::createCPUGenerator()) {}

  at::Generator for_one_operation() {
    if (!draws_as_cpu)
      drawing_.set_current_seed(seed_ * 6364136223846793005ull + offset_ * 1442695040888963407ull + 1);
    offset_ += 4;
    return drawing_;
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed, offset_ = 0;
    drawing_.set_current_seed(seed);
  }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    if (draws_as_cpu) return drawing_.unsafeGetGeneratorImpl()->set_state(state);
    TORCH_CHECK(state.numel() == kStateBytes, "RNG state is wrong size");
    const auto* numbers = static_cast<const uint64_t*>(state.data());
    seed_ = numbers[0], offset_ = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    if (draws_as_cpu) return drawing_.unsafeGetGeneratorImpl()->get_state();
    auto state = at::empty({kStateBytes}, at::TensorOptions().dtype(c10::kByte).device(c10::kCPU));
    auto* numbers = static_cast<uint64_t*>(state.data_ptr());
    numbers[0] = seed_, numbers[1] = offset_;
    return state.getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    const auto* state = static_cast<const DeviceGenerator*>(other.get());
    seed_ = state->seed_, offset_ = state->offset_;
  }

 private:
  static constexpr int64_t kStateBytes = 16;
  at::Generator drawing_;
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

// ---- what torch asks a device ---------------------------------------------------------------------------------------

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kNumDevices; }
  int getNumGPUs() const override { return kNumDevices; }
  DeviceIndex current_device() const override { return current_index; }
  DeviceIndex getCurrentDevice() const override { return current_index; }
  void setCurrentDevice(DeviceIndex index) const override { exchange(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current_index : index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static const at::Generator generators[kNumDevices] = {getNewGenerator(0), getNewGenerator(1)};
    return generators[index < 0 ? current_index : index];
  }
};

// Each device has one stream here; `streams.py` emulates the streams of Python.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  Device getDevice() const override { return current_device(); }
  void setDevice(Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { exchange(device.index()); }
  Device exchangeDevice(Device device) const override { return Device(c10::kCUDA, exchange(device.index())); }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void record(void** event, const c10::Stream&, DeviceIndex, c10::EventFlag) const override { *event = &event_; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static inline char event_;  // all events have happened
};

// ---- all operations -------------------------------------------------------------------------------------------------

// Return a tensor that says that it is on the CPU, and that has the memory of `tensor`.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const at::AutoDispatchBelowADInplaceOrView guard;
  void* memory = tensor.numel() ? tensor.data_ptr() : tensor.storage().mutable_data();
  auto alias = at::for_blob(memory, tensor.sizes())
                   .strides(tensor.strides())
                   .options(tensor.options().device(c10::kCPU).requires_grad(false))
                   .target_device(Device(c10::kCPU))
                   .allocator(c10::GetAllocator(c10::kCPU))
                   .resizeable_storage()
                   .make_tensor();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// Return a tensor on `device` that has the memory of a tensor on the CPU, and keeps that tensor alive.
Tensor on_device(const Tensor& tensor, Device device) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  order.allocate(tensor.data_ptr(), stream_of(device));
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([tensor](void* memory) { order.release(memory); })
      .options(tensor.options().device(device).requires_grad(false))
      .target_device(device)
      .make_tensor();
}

// Operations that accept indices on the CPU, or change where a tensor is.
const std::unordered_set<std::string> kMixing = {
    "aten::index",       "aten::index_put",     "aten::index_put_",
    "aten::_index_put_impl_", "aten::_unsafe_index", "aten::set_"};

// Operations that return a value to the host, which waits for it.
const std::unordered_set<std::string> kWaiting = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero",
                                                  "aten::masked_select", "aten::_unique2"};

// The arguments of one operation, as the CPU's kernel gets them.
class Arguments {
 public:
  explicit Arguments(const c10::FunctionSchema& schema) : schema_(schema) {}

  c10::IValue for_cpu(const c10::IValue& value) {
    if (value.isTensor()) return alias_of(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> aliases;
      for (const Tensor& tensor : value.toTensorVector()) aliases.push_back(alias_of(tensor));
      return aliases;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> aliases;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        aliases.push_back(tensor ? std::optional<Tensor>(alias_of(*tensor)) : std::nullopt);
      return aliases;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!device_) device_ = with_index(value.toDevice());
      return Device(c10::kCPU);
    }
    if (value.isGenerator()) {
      const auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                  generator.device().type(), "' (", schema_.name(), ")");
      return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->for_one_operation();
    }
    return value;
  }

  // Refuse tensors of several devices; return the device of the results.
  Device device() const {
    if (device_ && has_cpu_) TORCH_CHECK(kMixing.count(schema_.name()), two_devices(*device_, Device(c10::kCPU)));
    return with_index(device_);
  }

  // Begin the operation on its stream, and check its accesses to memory.
  void order_on(Device device) const {
    const auto stream = stream_of(device);
    if (kWaiting.count(schema_.name())) order.wait(-1, stream, order.now());
    const auto number = order.begin(stream);
    size_t place = 0;
    for (size_t i = 0; i < places_.size(); ++i) {
      const auto* declared = schema_.arguments()[places_[i].first].alias_info();
      for (; place < places_[i].second; ++place)
        order.access(aliases_[place].second.storage().data(), stream, number, declared && declared->isWrite(),
                     schema_.name());
    }
  }

  // Note that the next aliases are of the argument with an index.
  void end_argument(size_t index) { places_.emplace_back(index, aliases_.size()); }

  // Give the tensors on the device the memory and the shape of those that the kernel has resized.
  void follow_resized() const {
    for (const auto& [alias, own] : aliases_) {
      const bool has_moved = alias.numel() && alias.data_ptr() != own.data_ptr();
      if (alias.sizes() == own.sizes() && alias.strides() == own.strides() && !has_moved) continue;
      const auto moved = on_device(alias, own.device());
      own.unsafeGetTensorImpl()->set_storage_keep_dtype(moved.storage());
      own.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), moved.storage_offset());
    }
  }

  Tensor result(const Tensor& tensor, const c10::Argument& declared, Device device) const {
    for (const auto& [alias, own] : aliases_)
      if (alias.is_same(tensor)) return own;
    TORCH_CHECK(!declared.alias_info() || declared.alias_info()->isWrite(), "the emulated GPU lacks the operation ",
                schema_.name(), ", which returns a view");
    return on_device(tensor, device);
  }

 private:
  Tensor alias_of(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_cpu_ |= tensor.is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK(!device_ || *device_ == tensor.device(), two_devices(*device_, tensor.device()));
    device_ = tensor.device();
    aliases_.emplace_back(on_cpu(tensor), tensor);
    return aliases_.back().first;
  }

  std::string two_devices(Device one, Device other) const {
    return c10::str("Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
                    other, "! (", schema_.name(), ")");
  }

  const c10::FunctionSchema& schema_;
  OptionalDevice device_;
  bool has_cpu_ = false;
  std::vector<std::pair<Tensor, Tensor>> aliases_;  // on the CPU, on the device
  std::vector<std::pair<size_t, size_t>> places_;   // index of an argument, number of aliases up to and with it
};

void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  Arguments arguments(schema);
  const auto first = stack->size() - schema.arguments().size();
  for (size_t i = first; i < stack->size(); ++i) {
    (*stack)[i] = arguments.for_cpu((*stack)[i]);
    arguments.end_argument(i - first);
  }
  const auto device = arguments.device();
  if (order.is_checked) arguments.order_on(device);
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  arguments.follow_resized();
  const auto& declared = schema.returns();
  const auto first_result = stack->size() - declared.size();
  for (size_t i = 0; i < declared.size(); ++i) {
    auto& value = (*stack)[first_result + i];
    if (value.isTensor()) {
      value = arguments.result(value.toTensor(), declared[i], device);
    } else if (value.isTensorList()) {
      c10::List<Tensor> results;
      for (const Tensor& tensor : value.toTensorVector())
        results.push_back(arguments.result(tensor, declared[i], device));
      value = results;
    }
  }
}

// ---- operations that allocate memory, and views -----------------------------------------------------------------------

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

c10::ScalarType type_of(OptionalType type) { return type.value_or(c10::get_default_dtype_as_scalartype()); }

Tensor empty(c10::IntArrayRef sizes, OptionalType type, std::optional<c10::Layout>, OptionalDevice device,
             std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_generic(sizes, &device_memory, kKeys, type_of(type), format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, OptionalType type, std::optional<c10::Layout>,
                     OptionalDevice device, std::optional<bool>) {
  const c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, kKeys, type_of(type));
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (order.is_checked) {
    const auto stream = stream_of(to.is_cuda() ? to.device() : from.device());
    const auto number = order.begin(stream);
    if (from.is_cuda()) order.access(from.storage().data(), stream, number, false, "a copy");
    if (to.is_cuda()) order.access(to.storage().data(), stream, number, true, "a copy");
    const bool is_between = to.is_cuda() != from.is_cuda();
    if (is_between && non_blocking && is_pinned((to.is_cuda() ? from : to).data_ptr())) {
      order.copy_late(stream, on_cpu(to), on_cpu(from), to.is_cuda() ? to : from, to.is_cuda());
      return to;
    }
    if (is_between) order.wait(-1, stream, number);
  }
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

Tensor view_of(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset,
               caffe2::TypeMeta type) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                       tensor.key_set(), type);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

Tensor as_strided(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                  std::optional<int64_t> offset) {
  return view_of(tensor, sizes, strides, offset.value_or(tensor.storage_offset()), tensor.dtype());
}

Tensor reshape_alias(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return view_of(tensor, sizes, strides, tensor.storage_offset(), tensor.dtype());
}

Tensor view(const Tensor& tensor, c10::IntArrayRef sizes) {
  const auto shaped = on_cpu(tensor).view(sizes);
  return reshape_alias(tensor, shaped.sizes(), shaped.strides());
}

Tensor unfold(const Tensor& tensor, int64_t dimension, int64_t size, int64_t step) {
  const auto shaped = on_cpu(tensor).unfold(dimension, size, step);
  return reshape_alias(tensor, shaped.sizes(), shaped.strides());
}

Tensor view_dtype(const Tensor& tensor, c10::ScalarType type) {
  const auto shaped = on_cpu(tensor).view(type);
  const auto offset_bytes = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  return view_of(tensor, shaped.sizes(), shaped.strides(), offset_bytes / static_cast<int64_t>(shaped.element_size()),
                 shaped.dtype());
}

const Tensor& resize_(const Tensor& tensor, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const size_t needed =
      at::detail::computeStorageNbytesContiguous(sizes, tensor.element_size(), tensor.storage_offset());
  if (storage->nbytes() < needed) {
    const c10::DeviceGuard guard(tensor.device());
    auto larger = device_memory.allocate(needed);
    if (storage->nbytes()) std::memcpy(larger.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(needed);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

Tensor& set_(Tensor& tensor, c10::Storage storage, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  auto* implementation = tensor.unsafeGetTensorImpl();
  implementation->set_storage_keep_dtype(std::move(storage));
  if (strides.empty() && !sizes.empty()) {
    implementation->set_storage_offset(offset);
    implementation->set_sizes_contiguous(sizes);
  } else {
    implementation->set_sizes_and_strides(sizes, strides, offset);
  }
  return tensor;
}

Tensor& set_storage_(Tensor& tensor, c10::Storage storage) {
  const auto size = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  return set_(tensor, std::move(storage), 0, {size}, {});
}

[[maybe_unused]] const bool is_registered = [] {
  c10::SetAllocator(c10::kCUDA, &device_memory);
  return true;
}();

}  // namespace

using EmulatedHooks = Hooks;
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::EmulatedHooks)
}

namespace {

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("view.dtype", view_dtype);
  library.impl("unfold", unfold);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage", set_storage_);
  library.impl("set_.source_Storage_storage_offset", set_);
}

}  // namespace

// Set the current device of this thread, except if `index` is negative, and return the one before.
extern "C" int emulated_gpu_exchange(int index) { return exchange(static_cast<DeviceIndex>(index)); }
extern "C" int emulated_gpu_count() { return kNumDevices; }
extern "C" void emulated_gpu_draw_as_cpu(bool draws) { draws_as_cpu = draws; }
extern "C" void emulated_gpu_set_stream(int device, int64_t stream) { current_streams[device] = stream; }
extern "C" int64_t emulated_gpu_now() { return order.now(); }
extern "C" void emulated_gpu_wait(int64_t waiting, int64_t stream, int64_t number) {
  if (order.is_checked) order.wait(waiting, stream, number);
}
extern "C" void emulated_gpu_wait_for_all() {
  if (order.is_checked) order.wait_for_all();
}
extern "C" void emulated_gpu_record_use(const void* memory, int64_t stream) {
  if (order.is_checked) order.record_use(memory, stream);
}
extern "C" const char* emulated_gpu_check_order(bool checks) { return order.check_from_now(checks); }
extern "C" int64_t emulated_gpu_num_late() { return order.num_late; }
