// Makes torch believe in one CUDA device, for fake tensors: it has a stream, and a thread of
// autograd's. tests/fakecuda.py loads this into a process of its own.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <new>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

static const Device device(DeviceType::CUDA, 0);
static const Stream stream(Stream::DEFAULT, device);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return stream; }
  Stream getDefaultStream(Device) const override { return stream; }
  Stream exchangeStream(Stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

static const c10::impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Guard());
// torch keeps the hooks that it first asked for. Neither class has data: only the methods change.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
static const auto* const replaced =
    new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();

// What torch/csrc/autograd/engine.h declares, without the seconds that it takes to compile.
namespace torch::autograd {
struct Engine {
  static Engine& get_default_engine();
  void start_device_threads();
};
}  // namespace torch::autograd

// To be called once, after a backward pass: the engine looks for devices in its first one only.
extern "C" void start_device_threads() {
  torch::autograd::Engine::get_default_engine().start_device_threads();
}
