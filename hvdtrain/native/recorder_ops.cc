// The TensorFlow operations that record a collective of Horovod's and a phase.

#include <string>

#include "recorder.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvdtrain {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

class EnterOp : public OpKernel {
 public:
  explicit EnterOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("collective", &name_));
    OP_REQUIRES_OK(context, context->GetAttr("operation", &operation_));
    OP_REQUIRES_OK(context, context->GetAttr("bytes", &bytes_));
    OP_REQUIRES_OK(context, context->GetAttr("of_all_ranks", &is_of_all_ranks_));
  }

  void Compute(OpKernelContext* context) override {
    tensorflow::Tensor* record = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &record));
    record->scalar<int64_t>()() =
        EnterCollective(name_.c_str(), operation_.c_str(), bytes_, is_of_all_ranks_);
  }

 private:
  std::string name_, operation_;
  int64_t bytes_;
  bool is_of_all_ranks_;
};

class LeaveOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    LeaveCollective(context->input(0).scalar<int64_t>()());
  }
};

class PhaseOp : public OpKernel {
 public:
  explicit PhaseOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("phase", &phase_));
    OP_REQUIRES_OK(context, context->GetAttr("begins_step", &begins_step_));
  }

  void Compute(OpKernelContext*) override { EnterPhase(phase_, begins_step_); }

 private:
  int phase_;
  bool begins_step_;
};

// Stateful, with a resource as kernel.cc describes: not to be pruned, and ordered only
// among the operations that have the same resource.
REGISTER_OP("HvdtrainEnterCollective")
    .Input("token: resource")
    .Output("record: int64")
    .Attr("collective: string")
    .Attr("operation: string")
    .Attr("bytes: int")
    .Attr("of_all_ranks: bool")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("HvdtrainLeaveCollective")
    .Input("record: int64")
    .Input("token: resource")
    .SetIsStateful();

REGISTER_OP("HvdtrainEnterPhase")
    .Input("token: resource")
    .Attr("phase: int")
    .Attr("begins_step: bool")
    .SetIsStateful();

REGISTER_KERNEL_BUILDER(Name("HvdtrainEnterCollective").Device(tensorflow::DEVICE_CPU),
                        EnterOp);
REGISTER_KERNEL_BUILDER(Name("HvdtrainLeaveCollective").Device(tensorflow::DEVICE_CPU),
                        LeaveOp);
REGISTER_KERNEL_BUILDER(Name("HvdtrainEnterPhase").Device(tensorflow::DEVICE_CPU),
                        PhaseOp);

}  // namespace
}  // namespace hvdtrain
