// The TensorFlow operations HvdtrainAllreduce and HvdtrainCompare.

#include <chrono>
#include <string>
#include <utility>

#include "interface.h"
#include "reduction.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvdtrain {
namespace {

constexpr uint64_t kSeed = 14695981039346656037u;

uint64_t Hash(uint64_t hash, const void* data, size_t bytes) {
  // FNV-1a.
  for (size_t i = 0; i < bytes; ++i) {
    hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;
  }
  return hash;
}

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// What both operations share: a name and a text that describe one collective.
class Collective : public OpKernel {
 public:
  explicit Collective(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("collective", &name_));
    OP_REQUIRES_OK(context, context->GetAttr("description", &description_));
  }

 protected:
  uint64_t Start() const { return Hash(kSeed, name_.data(), name_.size()); }

  void Run(OpKernelContext* context, Reduction reduction) const {
    // 0 stands for a rank that has joined.
    if (reduction.signature == 0) reduction.signature = 1;
    std::lock_guard<std::mutex> lock(reduction_mutex);
    Segment* const shared = segment;
    OP_REQUIRES(context, shared != nullptr,
                absl::FailedPreconditionError(
                    "Horovod has been shut down: call hvd.init() first"));
    const auto start = std::chrono::steady_clock::now();
    const Report report = Allreduce(*shared, &reduction);
    reduction_nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() -
                                                      start)
                                 .count();
    OP_REQUIRES(context, report.outcome != Outcome::kMismatch,
                absl::FailedPreconditionError(
                    "Mismatched collectives. Sent by " + report.reason +
                    ". Call them alike on all ranks."));
    OP_REQUIRES(context, report.outcome != Outcome::kLost,
                absl::AbortedError("A collective has lost a rank: " + report.reason));
  }

  std::string name_, description_;
};

class AllreduceOp : public Collective {
 public:
  explicit AllreduceOp(OpKernelConstruction* context) : Collective(context) {
    OP_REQUIRES_OK(context, context->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(context, context->GetAttr("mean", &is_mean_));
  }

  void Compute(OpKernelContext* context) override {
    Reduction reduction{name_,  Signature(context), [&] { return Describe(context); },
                        dtype_, is_mean_,           {}};
    for (int i = 0; i < context->num_outputs(); ++i) {
      const tensorflow::Tensor& input = context->input(i);
      tensorflow::Tensor* output = nullptr;
      OP_REQUIRES_OK(context, context->forward_input_or_allocate_output(
                                  {i}, i, input.shape(), &output));
      if (input.NumElements() == 0) continue;
      reduction.pieces.push_back({static_cast<const char*>(input.data()),
                                  static_cast<char*>(output->data()),
                                  static_cast<size_t>(input.NumElements())});
    }
    Run(context, std::move(reduction));
  }

 private:
  uint64_t Signature(OpKernelContext* context) const {
    uint64_t hash = Hash(Start(), description_.data(), description_.size());
    const int32_t options[] = {dtype_, is_mean_, context->num_outputs()};
    hash = Hash(hash, options, sizeof(options));
    for (int i = 0; i < context->num_outputs(); ++i) {
      const tensorflow::TensorShape& shape = context->input(i).shape();
      for (int axis = 0; axis < shape.dims(); ++axis) {
        const int64_t length = shape.dim_size(axis);
        hash = Hash(hash, &length, sizeof(length));
      }
      hash = Hash(hash, ";", 1);
    }
    return hash;
  }

  std::string Describe(OpKernelContext* context) const {
    std::string text =
        name_ + ": " + description_ + " of " + tensorflow::DataTypeString(dtype_);
    for (int i = 0; i < context->num_outputs(); ++i) {
      text += " " + context->input(i).shape().DebugString();
    }
    return text;
  }

  tensorflow::DataType dtype_;
  bool is_mean_;
};

class CompareOp : public Collective {
 public:
  using Collective::Collective;

  void Compute(OpKernelContext* context) override {
    const int64_t checksum = context->input(0).scalar<int64_t>()();
    const uint64_t hash = Hash(Start(), &checksum, sizeof(checksum));
    // Without the description: it holds static shapes, which not all ranks may know.
    Run(context, {name_, hash, [&] { return name_ + ": " + description_; },
                  tensorflow::DT_INT32, false, {}});
  }
};

// Stateful: not to be folded, pruned, or merged with another that has equal inputs. The
// token is not read. tf.function runs stateful operations without a resource one after
// the other, also those of other kinds, and a reduction would wait for the end of a
// backward pass that has any.
REGISTER_OP("HvdtrainAllreduce")
    .Input("inputs: N * T")
    .Input("token: resource")
    .Output("outputs: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {half, bfloat16, float, double, int32, int64}")
    .Attr("mean: bool")
    .Attr("collective: string")
    .Attr("description: string")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      for (int i = 0; i < context->num_outputs(); ++i) {
        context->set_output(i, context->input(i));
      }
      return absl::OkStatus();
    });

REGISTER_OP("HvdtrainCompare")
    .Input("checksum: int64")
    .Input("token: resource")
    .Attr("collective: string")
    .Attr("description: string")
    .SetIsStateful();

REGISTER_KERNEL_BUILDER(Name("HvdtrainAllreduce").Device(tensorflow::DEVICE_CPU),
                        AllreduceOp);
REGISTER_KERNEL_BUILDER(Name("HvdtrainCompare").Device(tensorflow::DEVICE_CPU),
                        CompareOp);

}  // namespace
}  // namespace hvdtrain
