//! Objects behind handles, and the arguments of calls that name them.

use super::*;

/// The object behind a handle.
#[repr(C)]
pub(crate) struct Object<T> {
    magic: AtomicU64,
    value: T,
}

/// A kind of object: its magic number.
pub(crate) trait Kind: Sized + 'static {
    const MAGIC: u64;
    /// The answer of a call with a bad handle.
    const BAD: CUresult = INVALID_HANDLE;
}

impl<T> std::ops::Deref for Object<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Kind> Object<T> {
    /// A new object; it lives until [`Object::retire`].
    pub(crate) fn create(value: T) -> &'static Self {
        Box::leak(Box::new(Self { magic: AtomicU64::new(T::MAGIC), value }))
    }

    /// The object behind a handle.
    #[inline]
    pub(crate) unsafe fn get<H>(handle: *mut H) -> Res<&'static Self> {
        let at = handle.cast::<Self>();
        refuse_if((at as usize) < 4096 || !at.is_aligned() || (*at).magic.load(Relaxed) != T::MAGIC, T::BAD)?;
        Ok(&*at)
    }

    pub(crate) fn handle<H>(&'static self) -> *mut H {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    pub(crate) fn live(&self) -> bool {
        self.magic.load(Relaxed) == T::MAGIC
    }

    /// Makes the handle invalid; `false` if it already was. The object's memory stays, since others may still read it.
    pub(crate) fn retire(&self) -> bool {
        self.magic.swap(0, AcqRel) == T::MAGIC
    }
}

/// A static reference to an object.
pub(crate) type Ref<T> = &'static Object<T>;

/// An argument of a call which refers to an object.
pub(crate) trait Find<K> {
    type Found;

    /// # Safety
    /// The driver gave out the handle, or it is no address of the process.
    unsafe fn find(self) -> Res<Self::Found>;
}

impl<K: Kind, H> Find<K> for *mut H {
    type Found = Ref<K>;

    #[inline]
    unsafe fn find(self) -> Res<Ref<K>> {
        Object::get(self)
    }
}

/// The context of a handle, or the current one for a null handle.
pub(crate) struct OrCurrent;

impl<H> Find<OrCurrent> for *mut H {
    type Found = Ref<Context>;

    unsafe fn find(self) -> Res<Ref<Context>> {
        driver()?;
        if self.is_null() { current() } else { Object::get(self) }
    }
}

/// A pointer that is not null.
pub(crate) struct Given;

impl<T> Find<Given> for *const T {
    type Found = Self;

    unsafe fn find(self) -> Res<Self> {
        invalid_if(self.is_null()).map(|()| self)
    }
}

impl<T> Find<Given> for *mut T {
    type Found = Self;

    unsafe fn find(self) -> Res<Self> {
        invalid_if(self.is_null()).map(|()| self)
    }
}
