import { useLayoutEffect, useRef } from 'react'

/** A long text whose end matters most, such as a traceback: it opens at its last line. */
export function LastLines({ text }: { text: string }) {
  const box = useRef<HTMLPreElement>(null)
  useLayoutEffect(() => {
    if (box.current) box.current.scrollTop = box.current.scrollHeight
  }, [text])
  return (
    <pre ref={box} className="log wrap" tabIndex={0}>
      {text}
    </pre>
  )
}
