// A CUDA device that does nothing, for torch's CPU build: tensors without values can then be on "cuda".
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace at {

// torch finds the hooks by the name of their class.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CPUGeneratorImpl>(); }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at

namespace c10::impl {

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>);

}  // namespace c10::impl
