/** A card is a titled part of a page, and is as high as its content. */
import type { ReactNode } from 'react'

interface Props {
  title?: ReactNode
  /** Buttons and links at the right of the title. */
  actions?: ReactNode
  /** True for a table that reaches the card's edges. */
  isFlush?: boolean
  label?: string
  children: ReactNode
}

export function Card({ title, actions, isFlush = false, label, children }: Props) {
  return (
    <section className={`card${isFlush ? ' flush' : ''}`} aria-label={label}>
      {(title !== undefined || actions !== undefined) && (
        <header>
          {title !== undefined && <h2>{title}</h2>}
          {actions !== undefined && <div className="row">{actions}</div>}
        </header>
      )}
      {children}
    </section>
  )
}

/** A labelled value of a list of figures. */
export interface Figure {
  label: string
  value: ReactNode
  /** Name by which tests find the value: it becomes the attribute `data-figure`. */
  name?: string
  /** Secondary text below the value, in lists of large figures only. */
  note?: ReactNode
}

export function Figures({ figures, isLarge = false }: { figures: Figure[]; isLarge?: boolean }) {
  return (
    <dl className={`figures${isLarge ? ' large' : ''}`}>
      {figures.map(({ label, value, name, note }) => (
        <div key={label}>
          <dt>{label}</dt>
          <dd data-figure={name}>
            {value}
            {note !== undefined && <small>{note}</small>}
          </dd>
        </div>
      ))}
    </dl>
  )
}
