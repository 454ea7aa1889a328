/** The setting whether this browser shows notifications, for the page Settings. */
import { Button } from '@mantine/core'
import { useState } from 'react'

import { WATCH } from '../words/people'
import { Card } from './Card'
import { setWatching, useWatching } from './watching'

export function NotificationSettings() {
  const { isOn, runIds } = useWatching()
  const [isDenied, setDenied] = useState(false)
  const isSupported = typeof Notification !== 'undefined' && window.isSecureContext
  const start = async () => {
    const permission = await Notification.requestPermission()
    setDenied(permission !== 'granted')
    setWatching({ isOn: permission === 'granted' })
  }
  return (
    <Card title={WATCH.title} label={WATCH.title}>
      <p>{WATCH.explain}</p>
      <p className="dim">{WATCH.watched(runIds.size)}</p>
      {isSupported ? (
        <div className="row">
          <Button size="xs" variant="default" onClick={() => (isOn ? setWatching({ isOn: false }) : void start())}>
            {isOn ? WATCH.off : WATCH.on}
          </Button>
          <span className="dim">{isOn ? WATCH.state.on : WATCH.state.off}</span>
        </div>
      ) : (
        <p className="dim">{WATCH.unsupported}</p>
      )}
      {isDenied && <p role="alert">{WATCH.denied}</p>}
    </Card>
  )
}
