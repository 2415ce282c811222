//! Modules, kernels and tensor maps.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Device, DevicePtr, Stream, check, lock};
use crate::element::DType;
use crate::error::Result;

/// Kernels, loaded from a cubin once for all groups of the process.
#[derive(Debug)]
pub struct Module {
    device: Arc<Device>,
    loaded: Arc<Loaded>,
}

/// A module of the driver's. Unloaded with the context.
#[derive(Debug)]
pub(super) struct Loaded {
    /// The address of its image, which identifies it.
    image: usize,
    module: sys::CUmodule,
}

// SAFETY: modules may be used by any thread.
unsafe impl Send for Loaded {}
// SAFETY: the driver's calls are thread-safe.
unsafe impl Sync for Loaded {}

impl Loaded {
    /// Loads a cubin into the current context.
    fn new(rank: usize, cubin: &'static [u8]) -> Result<Loaded> {
        let mut module = std::ptr::null_mut();
        // SAFETY: writes the local; the image is a whole cubin, which says its own length.
        unsafe { cuda!(rank, cuModuleLoadData(&mut module, cubin.as_ptr().cast()))? };
        Ok(Loaded {
            image: cubin.as_ptr() as usize,
            module,
        })
    }
}

/// A kernel of a module that lives as long as the backend.
#[derive(Clone, Copy, Debug)]
pub struct Function(sys::CUfunction);

// SAFETY: functions may be used by any thread.
unsafe impl Send for Function {}
// SAFETY: they are handles.
unsafe impl Sync for Function {}

impl Module {
    pub fn load(device: &Arc<Device>, cubin: &'static [u8]) -> Result<Module> {
        let _bound = device.bind()?;
        let image = cubin.as_ptr() as usize;
        // Held while one is loaded, so that it is loaded once.
        let mut modules = lock(&device.gpu.lasting.modules);
        let known = modules.iter().find(|known| known.image == image);
        let loaded = match known {
            Some(known) => known.clone(),
            None => {
                let loaded = Arc::new(Loaded::new(device.rank, cubin)?);
                modules.push(loaded.clone());
                loaded
            }
        };
        Ok(Module {
            device: device.clone(),
            loaded,
        })
    }

    /// Finds a kernel, and loads it now. Loading at its first launch could wait for a kernel that this launch is to
    /// release.
    pub fn function(&self, name: &CStr, shared_bytes: u32) -> Result<Function> {
        let _bound = self.device.bind()?;
        let rank = self.device.rank;
        use sys::CUfunction_attribute_enum as attr;
        let mut function = std::ptr::null_mut();
        // SAFETY: writes the local; the module lives.
        unsafe {
            cuda!(
                rank,
                cuModuleGetFunction(&mut function, self.loaded.module, name.as_ptr())
            )?;
            cuda!(
                rank,
                cuFuncSetAttribute(
                    function,
                    attr::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared_bytes as i32
                )
            )?;
            let mut registers = 0;
            cuda!(
                rank,
                cuFuncGetAttribute(&mut registers, attr::CU_FUNC_ATTRIBUTE_NUM_REGS, function)
            )?;
        }
        Ok(Function(function))
    }

    /// How many clusters of `ctas` CTAs of `block` threads the device holds at a time.
    pub fn resident_clusters(
        &self,
        function: Function,
        ctas: u32,
        block: u32,
        shared_bytes: u32,
    ) -> Result<usize> {
        let _bound = self.device.bind()?;
        let mut clusters = 0;
        // SAFETY: a plain struct.
        let mut attribute: sys::CUlaunchAttribute = unsafe { MaybeUninit::zeroed().assume_init() };
        let shape = LaunchShape {
            shared_bytes,
            ..LaunchShape::new(ctas, block)
        };
        let mut config = shape.config(std::ptr::null_mut(), &mut attribute);
        // A kernel of single CTAs is compiled without clusters, so the driver must be told of them.
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attribute.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
            x: ctas,
            y: 1,
            z: 1,
        };
        (config.attrs, config.numAttrs) = (&mut attribute, 1);
        // SAFETY: writes the local; the function is of this module, which lives.
        unsafe {
            cuda!(
                self.device.rank,
                cuOccupancyMaxActiveClusters(&mut clusters, function.0, &config)
            )?;
        }
        Ok(clusters.max(1) as usize)
    }
}

/// The shape of a launch, and when it begins.
#[derive(Clone, Copy, Debug)]
pub struct LaunchShape {
    /// CTAs.
    pub grid: u32,
    /// Threads of a CTA.
    pub block: u32,
    /// Bytes of dynamic shared memory of a CTA.
    pub shared_bytes: u32,
    /// Whether it may begin before a kernel in front of it has ended (programmatic dependent launch). The kernel itself
    /// waits for that end. Anything else in front of it has ended.
    pub begins_early: bool,
}

impl LaunchShape {
    /// CTAs without dynamic shared memory, which begin after all in front of them.
    pub fn new(grid: u32, block: u32) -> LaunchShape {
        LaunchShape {
            grid,
            block,
            shared_bytes: 0,
            begins_early: false,
        }
    }

    /// As the driver takes it. `attribute`: memory for the launch's attribute.
    fn config(
        self,
        stream: sys::CUstream,
        attribute: &mut sys::CUlaunchAttribute,
    ) -> sys::CUlaunchConfig {
        attribute.id =
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = self.begins_early.into();
        sys::CUlaunchConfig {
            gridDimX: self.grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream,
            attrs: attribute,
            numAttrs: self.begins_early.into(),
        }
    }
}

impl Function {
    /// # Safety
    /// `arguments` point to values of the kernel's parameter types. The memory to which these values point is as the
    /// kernel needs it.
    pub unsafe fn launch(
        self,
        stream: &Stream,
        shape: LaunchShape,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: a plain struct.
        let mut attribute = unsafe { MaybeUninit::zeroed().assume_init() };
        let config = shape.config(stream.stream, &mut attribute);
        // SAFETY: as this function's; the driver copies the arguments, and the attribute lives.
        unsafe {
            cuda!(
                stream.device.rank,
                cuLaunchKernelEx(
                    &config,
                    self.0,
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut()
                )
            )
        }
    }
}

/// A tensor map: how a kernel's copies of boxes see a matrix.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct TensorMap(sys::CUtensorMap);

/// A row-major matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMatrix {
    pub ptr: DevicePtr,
    pub rows: usize,
    pub columns: usize,
    /// Bytes from row to row, a multiple of 16.
    pub pitch: usize,
}

impl TensorMap {
    /// A placeholder for a map that the kernel does not use.
    pub fn none() -> TensorMap {
        // SAFETY: a plain struct.
        TensorMap(unsafe { MaybeUninit::zeroed().assume_init() })
    }

    /// A map with boxes of `rows` by `columns` elements, a swizzle of 128 bytes, and zeros beyond the edges.
    ///
    /// `promote_to_l2`: whether the L2 cache reads 128 bytes at a time. With 256, H200s read memory up to 4 % slower.
    pub fn new(
        rank: usize,
        dtype: DType,
        matrix: DeviceMatrix,
        rows: u32,
        columns: u32,
        promote_to_l2: bool,
    ) -> Result<TensorMap> {
        use sys::CUtensorMapDataType_enum as Type;
        use sys::CUtensorMapL2promotion_enum as Promotion;
        let TensorMap(mut map) = TensorMap::none();
        // SAFETY: the pointers are to locals that are as long as two dimensions need.
        unsafe {
            cuda!(
                rank,
                cuTensorMapEncodeTiled(
                    &mut map,
                    match dtype {
                        DType::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                        DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                        DType::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                        DType::F8E4M3 | DType::F8E5M2 | DType::U8 => {
                            Type::CU_TENSOR_MAP_DATA_TYPE_UINT8
                        }
                        DType::U16 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT16,
                        DType::U32 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT32,
                        DType::U64 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT64,
                    },
                    2,
                    matrix.ptr as *mut c_void,
                    [matrix.columns as u64, matrix.rows as u64].as_ptr(),
                    [matrix.pitch as u64].as_ptr(),
                    [columns, rows].as_ptr(),
                    [1, 1].as_ptr(),
                    sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                    sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
                    if promote_to_l2 {
                        Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                    } else {
                        Promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE
                    },
                    sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
                )
            )?;
        }
        Ok(TensorMap(map))
    }
}
