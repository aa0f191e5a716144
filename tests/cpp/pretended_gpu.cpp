// A CUDA device that isn't there, for a torch without CUDA: autograd traces fake tensors of it.
// Loaded before torch, whose first look for hooks counts.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::Device getDevice() const override { return {kCuda, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {kCuda, 0}; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(
      void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }

 private:
  static c10::Stream stream() noexcept { return c10::Stream(c10::Stream::DEFAULT, {kCuda, 0}); }
};

struct CUDAHooks : at::CUDAHooksInterface {  // looked for by this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}
