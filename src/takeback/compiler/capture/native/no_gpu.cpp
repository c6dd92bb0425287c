// Lets torch's dispatcher, autograd and its choices of kernels take fake tensors of CUDA for tensors of CUDA where there
// is no GPU, or no CUDA in torch at all. Nothing can be computed by it: fake tensors have no bytes. `tb_begin` puts a
// device guard and the answers of an H200's cuDNN in place, `tb_end` puts back what was there.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace {

constexpr long kCuDNN = 91501;  // assumed: any 9.x gives the same answers

// Without `override`: which of these exist differs between versions of torch, and one more does no harm.
struct Answers : at::CUDAHooksInterface {
  virtual void init() const {}
  virtual bool isBuilt() const { return true; }
  virtual bool isAvailable() const { return true; }
  virtual bool hasPrimaryContext(at::DeviceIndex) const { return true; }
  virtual at::DeviceIndex deviceCount() const { return 1; }
  virtual at::DeviceIndex getCurrentDevice() const { return 0; }
  virtual void setCurrentDevice(at::DeviceIndex) const {}
  virtual at::DeviceIndex exchangeDevice(at::DeviceIndex) const { return 0; }
  virtual at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const { return 0; }
  virtual at::DeviceIndex current_device() const { return 0; }
  virtual int getNumGPUs() const { return 1; }
  virtual bool hasCUDA() const { return true; }
  virtual bool hasCuDNN() const { return true; }
  virtual bool hasCuBLASLt() const { return true; }
  virtual bool compiledWithCuDNN() const { return true; }
  virtual bool supportsDilatedConvolutionWithCuDNN() const { return true; }
  virtual bool supportsDepthwiseConvolutionWithCuDNN() const { return true; }
  virtual bool supportsBFloat16ConvolutionWithCuDNNv8() const { return true; }
  virtual bool supportsBFloat16RNNWithCuDNN() const { return true; }
  virtual long versionCuDNN() const { return kCuDNN; }
  virtual long versionRuntimeCuDNN() const { return kCuDNN; }
  virtual double batchnormMinEpsilonCuDNN() const { return 0.0; }
};
static_assert(sizeof(Answers) == sizeof(void*), "only its table of functions is exchanged");

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Device device() { return c10::Device(c10::DeviceType::CUDA, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

const c10::impl::DeviceGuardImplInterface* guard_before = nullptr;
void* answers_before = nullptr;
bool begun = false;

auto& slot() { return c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)]; }
void* hooks() { return const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()); }

}  // namespace

extern "C" __attribute__((visibility("default"))) void tb_begin() {
  if (begun) return;
  static const Guard guard;
  static const Answers answers;
  guard_before = slot().exchange(&guard);
  std::memcpy(&answers_before, hooks(), sizeof(void*));
  std::memcpy(hooks(), static_cast<const void*>(&answers), sizeof(void*));
  begun = true;
}

extern "C" __attribute__((visibility("default"))) void tb_end() {
  if (!begun) return;
  std::memcpy(hooks(), &answers_before, sizeof(void*));
  slot().store(guard_before);
  begun = false;
}
