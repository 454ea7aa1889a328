import { KEYS } from '../words/keys'
import { Dialog } from './Dialog'

/** All keys of the dashboard. */
export function KeyTables() {
  return (
    <div className="keygroups">
      {KEYS.groups.map(({ title, keys }) => (
        <section key={title}>
          <h3>{title}</h3>
          <dl className="keylist">
            {keys.map(([key, effect]) => (
              <div key={key}>
                <dt>
                  {key.split(' ').map((one) => (
                    <kbd key={one}>{one}</kbd>
                  ))}
                </dt>
                <dd>{effect}</dd>
              </div>
            ))}
          </dl>
        </section>
      ))}
    </div>
  )
}

export default function KeyHelp({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title={KEYS.title} onClose={onClose}>
      <KeyTables />
    </Dialog>
  )
}
