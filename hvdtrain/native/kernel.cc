// The TensorFlow operations HvdtrainAllreduce, HvdtrainReducescatter,
// HvdtrainAllgather and HvdtrainCompare.

#include <memory>
#include <string>
#include <utility>

#include "gathering.h"
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

Report Reduce(Segment& segment, const Reduction& reduction) {
  return Allreduce(segment, &reduction);
}

// What the operations share: a name and a text that describe one collective.
class Collective : public OpKernel {
 public:
  explicit Collective(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("collective", &name_));
    OP_REQUIRES_OK(context, context->GetAttr("description", &description_));
  }

 protected:
  uint64_t Start() const {
    const uint64_t number = caller;
    const uint64_t hash = Hash(kSeed, &number, sizeof(number));
    return Hash(hash, name_.data(), name_.size());
  }

  // `Arguments` is Reduction or Gathering.
  template <typename Arguments>
  void Run(OpKernelContext* context, Arguments arguments,
           Report (*exchange)(Segment&, const Arguments&)) const {
    // 0 stands for a rank that has joined.
    if (arguments.signature == 0) arguments.signature = 1;
    std::lock_guard<std::mutex> lock(reduction_mutex);
    const std::shared_ptr<Segment> shared = CurrentSegment();
    OP_REQUIRES(context, shared != nullptr,
                absl::FailedPreconditionError(
                    "Horovod has been shut down: call hvd.init() first; or trace the "
                    "function again, where ranks no longer reduce natively"));
    // In front: the middle of a long text is left out.
    arguments.describe = [describe = std::move(arguments.describe)] {
      return CallerText() + describe();
    };
    const Report report = exchange(*shared, arguments);
    OP_REQUIRES(context, report.outcome != Outcome::kMismatch,
                absl::FailedPreconditionError(
                    "Mismatched collectives. Sent by " + report.reason +
                    ". Call them alike on all ranks, in one thread."));
    OP_REQUIRES(context, report.outcome != Outcome::kLost,
                absl::AbortedError("A collective has lost a rank: " + report.reason));
  }

  std::string name_, description_;
};

// A sum or mean of a list of tensors.
class ReductionOp : public Collective {
 public:
  explicit ReductionOp(OpKernelConstruction* context) : Collective(context) {
    OP_REQUIRES_OK(context, context->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(context, context->GetAttr("mean", &is_mean_));
  }

 protected:
  Reduction Describe(OpKernelContext* context) const {
    return {name_,  Signature(context), [this, context] { return Text(context); },
            dtype_, is_mean_,           {}};
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

  std::string Text(OpKernelContext* context) const {
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

class AllreduceOp : public ReductionOp {
 public:
  using ReductionOp::ReductionOp;

  void Compute(OpKernelContext* context) override {
    Reduction reduction = Describe(context);
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
    Run<Reduction>(context, std::move(reduction), Reduce);
  }
};

// Each output is a part of the sum, which differs by rank: elements of the flat tensor.
class ReducescatterOp : public ReductionOp {
 public:
  explicit ReducescatterOp(OpKernelConstruction* context) : ReductionOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("starts", &starts_));
    OP_REQUIRES_OK(context, context->GetAttr("sizes", &sizes_));
  }

  void Compute(OpKernelContext* context) override {
    Reduction reduction = Describe(context);
    for (int i = 0; i < context->num_outputs(); ++i) {
      const tensorflow::Tensor& input = context->input(i);
      const int64_t start = starts_[i], size = sizes_[i];
      const int64_t rest = input.NumElements() - start - size;
      OP_REQUIRES(context, start >= 0 && size >= 0 && rest >= 0,
                  absl::InvalidArgumentError("a part is not within its tensor"));
      tensorflow::Tensor* output = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(i, {size}, &output));
      const char* next = static_cast<const char*>(input.data());
      const size_t bytes = tensorflow::DataTypeSize(input.dtype());
      const auto add = [&](int64_t elements, char* result) {
        if (elements == 0) return;
        reduction.pieces.push_back({next, result, static_cast<size_t>(elements)});
        next += elements * bytes;
      };
      add(start, nullptr);
      add(size, static_cast<char*>(output->data()));
      add(rest, nullptr);
    }
    Run<Reduction>(context, std::move(reduction), Reduce);
  }

 private:
  std::vector<int64_t> starts_, sizes_;
};

// Each output is the concatenation of the ranks' parts of it, in their order.
class AllgatherOp : public Collective {
 public:
  explicit AllgatherOp(OpKernelConstruction* context) : Collective(context) {
    OP_REQUIRES_OK(context, context->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(context, context->GetAttr("sizes", &sizes_));
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes_));
  }

  void Compute(OpKernelContext* context) override {
    const std::shared_ptr<Segment> shared = CurrentSegment();
    if (shared == nullptr) {
      Run<Gathering>(context, {}, Allgather);  // reports it
      return;
    }
    const int count = context->num_outputs(), ranks = shared->spread().job_size();
    OP_REQUIRES(context, sizes_.size() == static_cast<size_t>(count) * ranks,
                absl::InvalidArgumentError("sizes has not one number for each rank"));
    const size_t bytes = tensorflow::DataTypeSize(dtype_);
    Gathering gathering{name_, Signature(), [&] { return name_ + ": " + description_; },
                        bytes, std::vector<std::vector<Piece>>(ranks)};
    for (int i = 0; i < count; ++i) {
      const tensorflow::Tensor& input = context->input(i);
      tensorflow::Tensor* output = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(i, shapes_[i], &output));
      // The shape of an output that is not needed has no elements.
      char* next = output->NumElements() ? static_cast<char*>(output->data()) : nullptr;
      int64_t total = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const int64_t size = sizes_[i * ranks + rank];
        total += size;
        const bool is_mine = rank == shared->number(shared->rank());
        OP_REQUIRES(context, !is_mine || input.NumElements() == size,
                    absl::InvalidArgumentError("a part is not of its size"));
        const char* data = is_mine ? static_cast<const char*>(input.data()) : nullptr;
        if (size == 0) continue;
        gathering.pieces[rank].push_back({data, next, static_cast<size_t>(size)});
        if (next != nullptr) next += size * bytes;
      }
      OP_REQUIRES(context, next == nullptr || output->NumElements() == total,
                  absl::InvalidArgumentError("an output is not of its parts' size"));
    }
    Run<Gathering>(context, std::move(gathering), Allgather);
  }

 private:
  uint64_t Signature() const {
    uint64_t hash = Hash(Start(), description_.data(), description_.size());
    hash = Hash(hash, &dtype_, sizeof(dtype_));
    return Hash(hash, sizes_.data(), sizes_.size() * sizeof(int64_t));
  }

  tensorflow::DataType dtype_;
  std::vector<int64_t> sizes_;
  std::vector<tensorflow::TensorShape> shapes_;
};

class CompareOp : public Collective {
 public:
  using Collective::Collective;

  void Compute(OpKernelContext* context) override {
    const int64_t checksum = context->input(0).scalar<int64_t>()();
    const uint64_t hash = Hash(Start(), &checksum, sizeof(checksum));
    // Without the description: it holds static shapes, which not all ranks may know.
    Run<Reduction>(context,
                   {name_, hash, [&] { return name_ + ": " + description_; },
                    tensorflow::DT_INT32, false, {}},
                   Reduce);
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

REGISTER_OP("HvdtrainReducescatter")
    .Input("inputs: N * T")
    .Input("token: resource")
    .Output("outputs: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {half, bfloat16, float, double, int32, int64}")
    .Attr("mean: bool")
    .Attr("starts: list(int)")
    .Attr("sizes: list(int)")
    .Attr("collective: string")
    .Attr("description: string")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      std::vector<int64_t> sizes;
      TF_RETURN_IF_ERROR(context->GetAttr("sizes", &sizes));
      for (int i = 0; i < context->num_outputs(); ++i) {
        context->set_output(i, context->Vector(sizes[i]));
      }
      return absl::OkStatus();
    });

REGISTER_OP("HvdtrainAllgather")
    .Input("parts: N * T")
    .Input("token: resource")
    .Output("outputs: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {half, bfloat16, float, double, int32, int64}")
    .Attr("sizes: list(int)")
    .Attr("shapes: list(shape)")
    .Attr("collective: string")
    .Attr("description: string")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      std::vector<tensorflow::PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes));
      for (int i = 0; i < context->num_outputs(); ++i) {
        tensorflow::shape_inference::ShapeHandle shape;
        TF_RETURN_IF_ERROR(
            context->MakeShapeFromPartialTensorShape(shapes[i], &shape));
        context->set_output(i, shape);
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
REGISTER_KERNEL_BUILDER(Name("HvdtrainReducescatter").Device(tensorflow::DEVICE_CPU),
                        ReducescatterOp);
REGISTER_KERNEL_BUILDER(Name("HvdtrainAllgather").Device(tensorflow::DEVICE_CPU),
                        AllgatherOp);
REGISTER_KERNEL_BUILDER(Name("HvdtrainCompare").Device(tensorflow::DEVICE_CPU),
                        CompareOp);

}  // namespace
}  // namespace hvdtrain
