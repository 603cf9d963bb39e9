// What bindings share: checks of tvm-ffi tensors, the current stream, CUDA errors as exceptions.
// Only binding.cc files include this.
#pragma once

#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <initializer_list>
#include <string>

namespace mla::ffi {

using tvm::ffi::TensorView;

constexpr int64_t kAny = -1;  // a size that is not checked

inline bool is_dtype(const TensorView& tensor, DLDataTypeCode code, int bits) {
  const DLDataType dtype = tensor.dtype();
  return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
}

[[noreturn]] inline void refuse(const char* name, const std::string& got, const char* supported) {
  TVM_FFI_THROW(ValueError) << name << ": got " << got << "; supported: " << supported;
  throw;
}

// A tensor in an error: dtype, shape, strides, device.
inline std::string text(const TensorView& tensor) {
  const int64_t address = reinterpret_cast<int64_t>(tensor.data_ptr()) + tensor.byte_offset();
  std::string sizes, strides;
  for (int i = 0; i < tensor.ndim(); ++i) {
    sizes += (i ? ", " : "") + std::to_string(tensor.size(i));
    strides += (i ? ", " : "") + std::to_string(tensor.stride(i));
  }
  return tvm::ffi::DLDataTypeToString(tensor.dtype()) + " [" + sizes + "], strides [" + strides +
         "], address " + std::to_string(address) + ", device type " +
         std::to_string(tensor.device().device_type);
}

[[noreturn]] inline void refuse(const char* name, const TensorView& got, const char* supported) {
  refuse(name, text(got), supported);
}

inline uint8_t* address(const TensorView& tensor) {
  return static_cast<uint8_t*>(tensor.data_ptr()) + tensor.byte_offset();
}

// The data of a contiguous CUDA tensor of this type and shape; a ValueError names the argument.
inline void* data(const TensorView& tensor, const char* name, DLDataTypeCode code, int bits,
                  std::initializer_list<int64_t> shape) {
  bool fits = tensor.device().device_type == kDLCUDA && is_dtype(tensor, code, bits) &&
              tensor.ndim() == static_cast<int>(shape.size()) && tensor.IsContiguous();
  int axis = 0;
  for (int64_t size : shape) {
    fits = fits && (size == kAny || tensor.size(axis) == size);
    ++axis;
  }
  if (!fits) refuse(name, tensor, "a contiguous CUDA tensor of this kernel's type and shape");
  return address(tensor);
}

inline float* floats(const TensorView& tensor, const char* name,
                     std::initializer_list<int64_t> shape) {
  return static_cast<float*>(data(tensor, name, kDLFloat, 32, shape));
}

// Null where the tensor has no element: the argument is not given then.
inline float* optional_floats(const TensorView& tensor, const char* name,
                              std::initializer_list<int64_t> shape) {
  return tensor.numel() ? floats(tensor, name, shape) : nullptr;
}

inline int32_t* ints(const TensorView& tensor, const char* name,
                     std::initializer_list<int64_t> shape) {
  return static_cast<int32_t*>(data(tensor, name, kDLInt, 32, shape));
}

inline cudaStream_t current_stream(const TensorView& tensor) {
  const DLDevice device = tensor.device();
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

inline void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(code);
  }
}

}  // namespace mla::ffi
