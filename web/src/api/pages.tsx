/** Loads parts of the application when they are opened, also during a restart of the server and after an update. */
import { lazy, Suspense, type ComponentType, type LazyExoticComponent } from 'react'

/** The functions of the browser that a load needs. */
export interface Browser {
  /** Resolves once the server answers. */
  answers: () => Promise<void>
  /** Reloads the whole application. Returns false if a reload a moment ago did not help. */
  reload: () => boolean
}

type Load<T> = () => Promise<T>

/**
 * Load a part of the application.
 *
 * If the load fails, the function waits until the server answers and loads again. If the file is still missing, an
 * update has replaced the files of this application, and the function reloads the application. Rejects if that did not
 * help.
 */
export async function loaded<T>(load: Load<T>, browser: Browser = here): Promise<T> {
  try {
    return await load()
  } catch {
    await browser.answers()
  }
  try {
    return await load()
  } catch (error) {
    if (!browser.reload()) throw error
    return new Promise<never>(() => undefined) // the browser leaves this page
  }
}

const RETRY_MS = 2_000
const AGAIN_MS = 60_000
const RELOADED = 'everstep-reloaded-at'

const here: Browser = {
  answers: async () => {
    for (;;) {
      try {
        if ((await fetch('/v1/health', { cache: 'no-store' })).status < 500) return
      } catch {
        // the server does not answer yet
      }
      await new Promise((done) => setTimeout(done, RETRY_MS))
    }
  },
  reload: () => {
    const before = Number(sessionStorage.getItem(RELOADED) ?? 0)
    if (Date.now() - before < AGAIN_MS) return false
    sessionStorage.setItem(RELOADED, String(Date.now()))
    window.location.reload()
    return true
  },
}

const ahead: Load<unknown>[] = []

/** Return a component that loads on demand, as React's `lazy` does. `loadAhead` loads it earlier. */
export function lazyPart<P>(load: Load<{ default: ComponentType<P> }>): LazyExoticComponent<ComponentType<P>> {
  ahead.push(load)
  return lazy(() => loaded(load))
}

/** Return a component that loads on demand, with `Fallback` (by default, nothing) in its place until it is loaded. */
export function lazyWith<P extends object>(
  load: Load<{ default: ComponentType<P> }>,
  Fallback: ComponentType<P> = () => null,
): ComponentType<P> {
  const Part = lazyPart(load) as ComponentType<P>
  return (props) => (
    <Suspense fallback={<Fallback {...props} />}>
      <Part {...props} />
    </Suspense>
  )
}

/** Load every part, so that pages open while the server is away. A part that fails loads again when it is opened. */
export async function loadAhead(): Promise<void> {
  for (const load of ahead) await load().catch(() => undefined)
}
